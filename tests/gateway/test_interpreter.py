import gc

from gateway.interpreter import settle


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_there_is_not_looked_at_again_and_what_comes_later_is() -> None:
    try:
        settle()
        assert len(gc.get_objects()) < 1000, "thousands of objects of the imports are out of sight"
        for _ in range(100):
            Cycle()
        assert gc.collect() >= 100
    finally:
        gc.unfreeze()


def test_what_a_reload_left_behind_goes_with_the_next_call() -> None:
    try:
        old = Cycle()
        settle()
        del old
        assert not any(isinstance(thing, Cycle) for thing in gc.get_objects())
        settle()
        gc.unfreeze()
        assert not any(isinstance(thing, Cycle) for thing in gc.get_objects())
    finally:
        gc.unfreeze()

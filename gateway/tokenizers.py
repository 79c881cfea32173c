"""Which tokenizer backend answers for which model, made from the configuration.

Loading a tokenizer takes a second or two of CPU; it happens before the gateway says that it is serving.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.config import LoadedConfig
from gateway.config_document import Images
from gateway.served_models import Served
from tokenization.backends import Backend, EstimateBackend, LocalBackend
from tokenization.engine_backend import EngineBackend
from tokenization.local import LocalTokenizer

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""
_Source = tuple[object, ...]
"""What a tokenizer was made from: directory, when it changed last, options."""


class TokenizerError(Exception):
    """A tokenizer that the configuration names cannot be used; the message says which and why."""


class Tokenizers:
    """Backends by model. One instance per configuration; `close` gives up its threads and connections."""

    def __init__(self) -> None:
        self._default: Backend | None = None
        self._by_model: dict[str, Backend] = {}
        self._backends: list[Backend] = []
        self._loaded: dict[_Source, Backend] = {}
        self.budget_s = 0.0
        """The longest a backend may itself take; a shorter limit around it would only hide its fallback."""

    @classmethod
    async def load(cls, config: LoadedConfig, before: "Tokenizers | None" = None) -> "Tokenizers":
        """Load what `config` names, each directory once; what `before` has of it is used again. Raises TokenizerError."""
        found = cls()
        loaded = dict(before._loaded) if before else {}
        for model, settings in config.settings.models.items():
            if settings.tokenizer:
                found._by_model[model] = await found._local(Path(settings.tokenizer), loaded, settings.images)
        parameters = config.token_producer.parameters
        match parameters.kind:
            case "local":
                assert parameters.local is not None  # the kind says so
                found._default = await found._local(Path(parameters.local.path), loaded)
            case "vllm":
                render = parameters.vllm
                url = render.url if render else "http://localhost:8000"
                budget, media = (render.timeout, render.mm_timeout) if render else (5.0, 30.0)
                found.budget_s = max(budget, media)
                fallback = EstimateBackend()
                found._default = found._keep(
                    EngineBackend(url, fallback, model=parameters.model_name, budget_s=budget, media_budget_s=media)
                )
            case "estimate":
                found._default = found._keep(EstimateBackend())
            case "models":
                if not found._by_model:
                    found._default = found._keep(EstimateBackend())
        return found

    def backend(self, served: Served) -> Backend | None:
        """Who tokenizes for this model; None where nobody does."""
        return self._by_model.get(served.base) or self._default

    def decoder(self, served: Served) -> Decode | None:
        """Token ids to text, where this process has the model's tokenizer."""
        backend = self.backend(served)
        return backend.tokenizer.decode if isinstance(backend, LocalBackend) else None

    def local(self) -> dict[str, LocalTokenizer]:
        """Model -> tokenizer, for those that tokenize here; the default one under the name ""."""
        return {
            name: backend.tokenizer
            for name, backend in {**self._by_model, "": self._default}.items()
            if isinstance(backend, LocalBackend)
        }

    def backends(self) -> dict[str, Backend]:
        """Each backend once, under the name of the first model it is for; the default one is called `default`."""
        named = {id(backend): (name, backend) for name, backend in reversed(self._by_model.items())}
        if self._default is not None:
            named.setdefault(id(self._default), ("default", self._default))
        return dict(named.values())

    async def close(self, keep: "Tokenizers | None" = None) -> None:
        """Give up threads and connections, but for those that `keep` uses too."""
        kept = set(map(id, keep._backends)) if keep else set()
        for backend in self._backends:
            if id(backend) not in kept:
                await backend.close()

    async def _local(self, path: Path, loaded: dict[_Source, Backend], images: Images | None = None) -> Backend:
        images = images or Images()
        options = {"image_hash": images.hash, "min_pixels": images.min_pixels, "max_pixels": images.max_pixels}
        name = (path, _newest(path), *options.values())
        if name in loaded:
            self._loaded[name] = loaded[name]
            return loaded[name] if loaded[name] in self._backends else self._keep(loaded[name])
        log.info("tokenizer_loading path=%s", path)
        started = time.monotonic()
        try:
            tokenizer = await asyncio.to_thread(LocalTokenizer.from_directory, path, **options)
        except (OSError, ValueError) as error:
            raise TokenizerError(f"tokenizer {path}: {error}") from error
        log.info(
            "tokenizer_loaded path=%s encoder=%s cut_token=%r images=%s seconds=%.1f",
            path,
            tokenizer.encoder,
            tokenizer.cut_token,
            "named" if tokenizer.knows_images else "unknown",
            time.monotonic() - started,
        )
        loaded[name] = self._loaded[name] = self._keep(LocalBackend(tokenizer))
        return loaded[name]

    def _keep(self, backend: Backend) -> Backend:
        self._backends.append(backend)
        return backend


def _newest(path: Path) -> int:
    """When a file in the directory was changed last, ns: the same path with another tokenizer is another tokenizer."""
    return max((entry.stat().st_mtime_ns for entry in path.iterdir() if entry.is_file()), default=0)

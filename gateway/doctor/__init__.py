"""The doctor: facts are gathered by `examination` (sockets), judged by `*_checks` (pure), printed by `report`."""

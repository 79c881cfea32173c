"""The ext-proc service around everything: protocol core, request path, scheduling cycle, configuration, commands."""

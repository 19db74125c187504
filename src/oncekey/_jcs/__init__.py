"""RFC 8785 behind ``oncekey.canonical``: the pure writer and parser, faults, the orjson path."""

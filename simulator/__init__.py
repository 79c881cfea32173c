"""A vLLM-like engine model: a real-time server and a virtual-time driver."""

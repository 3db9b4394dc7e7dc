"""The terminal: a client of the engine. It holds no logic of the method."""

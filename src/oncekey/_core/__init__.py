"""The engine: transitions without I/O, flows as generators, and the drivers that run them."""

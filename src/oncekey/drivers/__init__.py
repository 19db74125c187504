"""The libraries that a connection may come from, one file a library."""

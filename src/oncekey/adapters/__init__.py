"""One file a framework: a request is translated for the core, and its answer translated back."""

"""The dashboard at ``/_oncekey``: a page a module, drawn on the server, alive with one script."""

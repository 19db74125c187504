"""One file a backend; ``oncekey.connect`` finds it by the URL's scheme."""

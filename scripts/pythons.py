"""Find the Pythons to build and test with: those of 3.11 to 3.13 that really run.

A name on PATH proves nothing (a pyenv shim may exist for a version that is not selected), so every
candidate is run. Standard library only, and written to run on old Pythons too.

Prints a line for each usable version, oldest first: the version, a space, the path.
"""

import os
import subprocess
import sys

MINORS = (11, 12, 13)
PROBE = (
    "import sys, ensurepip, sqlite3, ssl, venv;"
    "print('%d.%d' % sys.version_info[:2]); print(sys.executable)"
)


def candidates():
    """Every path that may be a Python, best first: PATH, then pyenv's versions."""
    names = ["python3.%d" % minor for minor in MINORS] + ["python3", "python"]
    found = [sys.executable]
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        found += [os.path.join(folder, name) for name in names if folder]
    root = os.environ.get("PYENV_ROOT") or os.path.join(os.path.expanduser("~"), ".pyenv")
    versions = os.path.join(root, "versions")
    if os.path.isdir(versions):
        for version in sorted(os.listdir(versions), key=_patch, reverse=True):
            if version.startswith(tuple("3.%d." % minor for minor in MINORS)):
                found.append(os.path.join(versions, version, "bin", "python"))
    usable = [path for path in found if path and os.access(path, os.X_OK)]
    return list(dict.fromkeys(usable))


def _patch(version):
    last = version.split(".")[-1]
    return int(last) if last.isdigit() else -1


def probe(paths):
    """Run all of them at once; yield (version, path) of those that work, in order."""
    running = []
    for path in paths:
        try:
            child = subprocess.Popen(
                [path, "-I", "-c", PROBE],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                universal_newlines=True,
            )
        except OSError:
            continue
        running.append(child)
    for child in running:
        lines = child.communicate()[0].splitlines()
        if child.returncode == 0 and len(lines) == 2:
            yield lines[0], lines[1]


def usable():
    """Versions to paths, oldest first."""
    wanted = ["3.%d" % minor for minor in MINORS]
    working = {}
    for version, path in probe(candidates()):
        working.setdefault(version, path)
    found = {version: working[version] for version in wanted if version in working}
    if not found:
        # None that we test with: a newer Python is worth a try, an older one is not.
        newer = [v for v in working if v.startswith("3.") and int(v[2:]) > MINORS[-1]]
        found = {version: working[version] for version in newer[:1]}
    return found


def main():
    """Print what was found; 1 and a hint if there is nothing."""
    found = usable()
    for version, path in found.items():
        print("%s %s" % (version, path))
    if not found:
        sys.stderr.write("No Python 3.11 or newer found that has venv, ensurepip and sqlite3.\n")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())

"""Say in one sentence what the locked wheels and the engine's build lack here, in words that every Python 3 reads."""

import os
import platform
import sys

version, here = sys.version_info[:2], os.getcwd()
if not (3, 11) <= version <= (3, 14):
    said = "Python %d.%d: the locked packages are for 3.11 to 3.14\n  mend: make PYTHON=python3.13"
    sys.exit(said % version)
if platform.system() == "Darwin" and platform.machine() != "arm64":
    sys.exit(
        "Python for " + platform.machine() + " (an Intel Mac's, or under Rosetta): the locked packages are for Apple "
        "silicon\n  mend: make PYTHON=/opt/homebrew/bin/python3.13, in a terminal without Rosetta"
    )
if set(here) & set(" \t'\"\\$`:;"):
    sys.exit(
        here + ": a blank, a quote, a colon or the like in a path breaks the engine's build\n  mend: move the folder"
    )

"""The folder deploy/ is no package that is installed; tests import it from the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

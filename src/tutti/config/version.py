"""The version of tutti, which a source tree without an installed package knows too."""

from typing import Final

VERSION: Final = "0.1.0"
"""The version in pyproject.toml."""

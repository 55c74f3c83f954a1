"""Names of the last release that the next one removes."""

import warnings
from collections.abc import Collection
from typing import Any


class Options:
    """Options of all averaging algorithms or compressors. `make` takes the options of one.

    `AveragingOptions` and `CompressorOptions`. Use keyword arguments of `make` in their place.
    """

    def __init__(self, **given: Any):
        warnings.warn(
            "AveragingOptions and CompressorOptions: use keyword arguments of make",
            FutureWarning,
            stacklevel=2,
        )
        nested: Options | None = given.pop("compressor_options", None)
        self.given: dict[str, Any] = given | (nested.given if nested else {})

    def own(self, known: Collection[str]) -> dict[str, Any]:
        """The known options."""
        return {option: value for option, value in self.given.items() if option in known}

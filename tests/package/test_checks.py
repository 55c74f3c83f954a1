"""Laws of the checks: the accepted values, and the fields of the error for the others."""

import math
import pickle
from typing import Any

import pytest

from powergossip import checks

ACCEPTED: dict[str, tuple[list[Any], list[Any]]] = {
    "at_least_one": ([1, 7, 1.5], [0, -1, math.nan, "one", None]),
    "not_negative": ([0, 0.5], [-1, math.nan, "zero", None]),
    "positive": ([1e-9, 3], [0, -1, math.inf, math.nan, "much", None]),
    "fraction": ([0, 0.3, 1], [-0.1, 1.1, math.nan, "half"]),
    "below_one": ([0, 0.99], [-0.1, 1, math.nan]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_values_pass_and_others_raise_with_name_and_value(name: str) -> None:
    check, (good, bad) = getattr(checks, name), ACCEPTED[name]
    for value in good:
        check("some_key", value)
    for value in bad:
        with pytest.raises(checks.BadValue) as caught:
            check("some_key", value)
        assert (caught.value.name, caught.value.accepted != "") == ("some_key", True)
        assert caught.value.value is value


def test_an_error_survives_pickling() -> None:
    """Between the processes of a run, for instance."""
    again = pickle.loads(pickle.dumps(checks.BadValue("rank", 0, "1 or more")))
    assert (str(again), again.accepted) == ("rank=0: use 1 or more", "1 or more")

"""Every defect that applies to this design makes the test named beside it fail."""

import pytest

from tests.mutants import MUTANTS, NOT_OURS, Mutant, kills


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.row}: {mutant.defect}")
def test_the_mutant_is_killed(mutant: Mutant) -> None:
    assert kills(mutant)


def test_every_row_of_the_catalogue_is_a_mutant_or_has_a_reason() -> None:
    assert [*(mutant.row for mutant in MUTANTS), *NOT_OURS] == list(range(1, 38))

"""Which rounds are measured on the unseen domain."""

from helpers import run_small

from hfedatm.base.results import read_rounds


def test_the_unseen_domain_is_measured_though_no_client_can_spare_validation_examples(tmp_path):
    folder = run_small(tmp_path, validation_fraction=1e-6, evaluate_every=2, rounds=3)
    rounds = read_rounds(folder)
    assert [record.source for record in rounds] == [None, None, None]
    assert [record.unseen is not None for record in rounds] == [False, True, True]

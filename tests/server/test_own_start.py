"""Each station's own start: the same whenever it is made, also while clients train."""

from threading import Thread

import torch

from hfedatm.base.building import build_method, load_data
from hfedatm.base.records import record_to_state
from hfedatm.base.resolving import resolve
from hfedatm.base.seeding import torch_turn
from server_app.run import _own_start


def test_a_stations_start_is_not_made_while_a_client_draws_from_the_same_random_state():
    settings = resolve({"station-start": "own"})
    parts = settings, load_data(settings).spec, build_method(settings)
    expected = record_to_state(_own_start(*parts, 1))
    made = []
    with torch_turn:  # a client trains
        before = torch.random.get_rng_state()
        asked = Thread(target=lambda: made.append(_own_start(*parts, 1)), daemon=True)
        asked.start()
        asked.join(0.3)
        assert not made and torch.equal(torch.random.get_rng_state(), before)
    asked.join()
    start = record_to_state(made[0])
    assert all(torch.equal(start[name], value) for name, value in expected.items())

"""A client's work on one message: build the model, train it, measure it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, Context, RecordDict

from client_app.data import client_data, data_identity
from client_app.rows import require_rows
from client_app.secure import Start, withhold
from client_app.train_fn import call_train_fn, load_train_fn
from client_app.training import torch_threads, train_locally
from hfedatm.base.batches import Batches
from hfedatm.base.building import (
    build_method,
    build_metrics,
    build_model,
    build_rule,
    example_grams,
    gram_options,
    pick_device,
    trace_channels,
)
from hfedatm.base.class_profiles import profiles_to_record
from hfedatm.base.errors import UserError
from hfedatm.base.evaluation import evaluate
from hfedatm.base.index_maps import read_maps
from hfedatm.base.kept_model import KeptModel
from hfedatm.base.learning import find_augmentations
from hfedatm.base.memory import NodeMemory
from hfedatm.base.metric_sums import no_sums
from hfedatm.base.own_metrics import sendable
from hfedatm.base.privacy_settings import (
    gram_examples,
    gram_mechanism,
    is_private,
    why_not_exact,
)
from hfedatm.base.records import Task, find_record, record_to_state
from hfedatm.base.schedule import learning_rate
from hfedatm.base.seeding import derive, seed_torch
from hfedatm.base.trust.checking import check_profiles, check_revealed
from hfedatm.base.trust.policy import Policy
from hfedatm.contracts import Method, State, TrainingContext
from hfedatm_core import Gram, collect_grams, collect_profiles
from hfedatm_core.data import concat
from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.grams.encoding import WireType
from hfedatm_core.norm_statistics import norm_moments

if TYPE_CHECKING:
    from client_app.ledger import LedgerFile
    from client_app.private_release import ClientPrivacy


LOOK_BATCH = 256
"""Examples by which BatchNorms normalise in a second look; more are closer to all examples."""


class LocalWork:
    """One message's work: the received model on this client's examples."""

    def __init__(self, content: RecordDict, context: Context) -> None:
        self.content, self._context = content, context
        self.task = Task.from_record(content["task"])
        settings = self.settings = self.task.settings
        self.device = pick_device(settings)
        # The server checks this too, but a client must not rely on a server it does not own.
        method = build_method(settings)
        if settings.dp_sgd and self.task.kind != "evaluate" and not method.per_example_loss:
            raise UserError(
                f"dp-sgd: client-method = {settings.client_method!r} mixes examples or sends "
                "more than the model, which DP-SGD does not cover"
            )
        if self.task.kind in ("prepare", "train"):
            check_revealed(Policy.current(), method.reveals)
        self._profiled = build_rule(settings).wants_profiles(settings, self.task.round)
        if self._profiled and self.task.kind in ("train", "measure"):
            check_profiles(Policy.current(), self._profiled)
        self.data = client_data(settings, self.task.client, context.node_config)
        self.method = build_method(settings, self.data.spec, self.task.client)
        name, root = f"client-{self.task.client}", context.node_config.get("state-dir")
        self.memory = NodeMemory(self.task.run, name, root)  # type: ignore[arg-type]
        self.kept = KeptModel(self.task, name, root)  # type: ignore[arg-type]
        self.received = self.kept.received(content)
        shared = find_record(content, "shared", ArrayRecord)
        self.shared = record_to_state(shared) if shared else {}
        self.maps = read_maps(content, self.received, self.task.round)
        self.model = build_model(settings, self.data.spec, self.method)
        self.model.load_state_dict(self.received)
        self.num_examples = len(self.data.train)
        start = Start.of(content)
        self.asked = start.asked if start else 1
        self.privacy = self._privacy() if is_private(settings) else None
        self.model.to(self.device)
        self._moment = (self.task.round, self.task.station_round)
        hop = (self.task.hop,) if self.task.hop else ()
        self._seed = derive(settings.seed, "client", self.task.client, *self._moment, *hop)
        # A further hop goes on from what the hop before it kept in the same station round.
        self._before = (self.task.round, self.task.station_round + bool(hop))

    def share(self) -> State:
        """Return the arrays that the method averages before the round."""
        with self.reproducible():
            return self.method.share(self.model, self.batches())

    def train(self) -> dict[str, float]:
        """Train with the project's loop, or with the user's training function."""
        if self.privacy:
            self.privacy.require()
        with self.reproducible():
            if self.settings.train_fn:
                return self._train_with(load_train_fn(self.settings))
            self.method.begin(self.model, self.shared, self._remembered(self.method))
            lr = learning_rate(self.settings, *self._moment)
            if self.settings.dp_sgd:
                loss = self._train_privately(lr)
            else:
                shuffled = self.batches(derive(self._seed, "order"))
                loss = train_locally(self.model, self.method, shuffled, self.settings, lr)
                self.method.finish(self.model, self._validation() if self._may_score() else ())
        if kept := self.method.remember():
            self.memory.save(self._moment, kept)
        if self.settings.dp_sgd:
            return {"loss": loss}  # other numbers are exact, and no ε covers them
        return sendable({"loss": loss, **self.method.metrics()})

    def _train_with(self, train_fn: Callable[..., Any]) -> dict[str, float]:
        context = TrainingContext(
            round=self.task.round,
            station_round=self.task.station_round,
            lr=learning_rate(self.settings, *self._moment),
            validation=self._validation(),
            device=self.device,
            memory=self._remembered(),
            task=self.method.task,
        )
        shuffled = self.batches(derive(self._seed, "order"))
        metrics = call_train_fn(
            train_fn, self.model, shuffled, self.received, self.settings, context
        )
        if context.memory:
            kept = {name: tensor.detach() for name, tensor in context.memory.items()}
            self.memory.save(self._moment, kept)
        return sendable(metrics)

    def _remembered(self, method: Method | None = None) -> State:
        """Return what this client kept, in the channel order of the received model."""
        follows = method.follows(self.model) if method and self.maps else {}
        return self.memory.load(
            self._before,
            lambda saved, kept: self.maps.moved(saved, kept, self.received, follows),
        )

    def _may_score(self) -> bool:
        """Return whether scores on validation examples may leave."""
        policy = Policy.current()
        return policy.privacy.evaluate or not policy.is_owners

    def _train_privately(self, lr: float) -> float:
        from client_app.private_training import train_privately

        assert self.privacy is not None
        return train_privately(
            self.model,
            self.method,
            self.batches(),
            self.settings,
            lr,
            sigma=self.privacy.sigma,
            sample_rate=self.privacy.sample_rate,
            steps=self.privacy.steps,
            source=self.privacy.source("dp-sgd"),
        )

    def grams(self) -> dict[str, Gram]:
        """Return the Grams of the trained model's layer inputs, as this client may send them."""
        s, mechanism = self.settings, gram_mechanism(self.settings)
        if self.privacy:
            self.privacy.require()
        with self.reproducible():
            grams = collect_grams(
                self.model,
                self.batches(),
                clip=mechanism.example_clip,
                max_batches=s.gram_batches or None,
                **gram_options(s, self.task.round),
            )
        if self.privacy and mechanism.noised:
            return self.privacy.release(grams, gram_examples(s, self.num_examples), self.asked)
        require_rows(grams, s)
        return grams

    def profiles(self) -> dict[str, ArrayRecord]:
        """Return the record of class profiles that goes with Grams, if the rule asks for it."""
        if not self._profiled:
            return {}
        if why := why_not_exact(self.settings):
            raise UserError(f"class profiles: refused, because {why}")
        traced = build_model(self.settings, self.data.spec, self.method)  # on the CPU
        graph = trace_channels(self.settings, None, traced, self.data.spec)
        with self.reproducible():
            found = collect_profiles(
                self.model, graph, self.batches(), self.data.spec.num_classes
            ).of_classes_with(self._profiled)
        return {"profiles": profiles_to_record(found)}

    @property
    def gram_dtype(self) -> WireType:
        """Return the type in which Grams leave.

        A secure sum gets them unrounded: if each number were rounded to steps of its own size, the
        sum could be taken apart again.
        """
        return "float64" if self.settings.secure_aggregation else self.settings.gram_dtype

    def spend(self) -> dict[str, float]:
        """Book the reply's releases before it leaves; return the numbers to report about them."""
        return {"epsilon": self.privacy.spend()} if self.privacy else {}

    def deliver(self, reply: RecordDict) -> RecordDict:
        """Return the reply or, with secure aggregation, the public keys that stand for it."""
        return withhold(reply, self.content, self.task, self._context)

    def evaluate(self) -> tuple[dict[str, float], State]:
        """Return loss and summed scores, in total and by domain, and the sums of metrics.

        All of them are measured on this client's validation examples.
        """
        numbers = {"loss": 0.0, "correct": 0.0, "num-examples": 0.0}
        metrics = build_metrics(self.settings, self.data.spec)
        sums = no_sums(metrics, self.settings)
        metrics = {name: metrics[name] for name in sums}
        with self.reproducible():
            for domain in self.data.validation:
                batches = Batches(domain, self.data.spec, 256, self.device)
                found = evaluate(self.model, batches, metrics, self.method.task)
                numbers["loss"] += found.loss * len(domain)
                for count, number in (("correct", found.correct), ("num-examples", found.examples)):
                    numbers[count] += number
                    numbers[f"{count}/{domain.name}"] = number
                sums = {name: sums[name] + found.sums[name] for name in sums}
        numbers["loss"] /= max(1.0, numbers["num-examples"])
        return numbers, sums

    def norm_moments(self) -> tuple[State, int]:
        """Return the moments of every BatchNorm's input, and how many examples they are from."""
        s = self.settings
        if why := why_not_exact(s):
            raise UserError(f"second look: refused, because {why}")
        if self.num_examples < s.gram_min_rows:
            raise UserError(
                f"second look: statistics of {self.num_examples} examples, fewer than "
                f"gram-min-rows = {s.gram_min_rows}, would tell too much about each"
            )
        # Shuffled, because a batch of one class has statistics that no other batch has.
        order = derive(self._seed, "look")
        batches = Batches(self.data.train, self.data.spec, LOOK_BATCH, self.device, order)
        with self.reproducible():
            found = norm_moments(self.model, batches, by_batch=self.task.station_round <= 1)
        self.kept.keep(self.received)
        return found

    def _privacy(self) -> ClientPrivacy | None:
        if self.task.kind not in ("train", "measure"):
            return None
        from client_app.private_release import ClientPrivacy  # late: Opacus is slow to import

        s = self.settings
        noised = gram_mechanism(s).noised
        grams = len(distinct(example_grams(s, self.model, self.data.spec))) if noised else 0
        return ClientPrivacy(self.task, self.num_examples, grams, self._ledger())

    def _ledger(self) -> LedgerFile:
        """Return the account of this client's run or, if its data have an owner, of the data."""
        from client_app.ledger import DataLedgerFile, LedgerFile  # late: Opacus, too

        policy, config = Policy.current(), self._context.node_config
        if not policy.is_owners:
            return LedgerFile(self.memory.folder)
        data = data_identity(self.settings, config, policy)
        return DataLedgerFile(self.memory.root, data, self.task.run)

    def batches(self, seed: int | None = None) -> Batches:
        """Return the training examples; with a seed shuffled and augmented, to train on."""
        s = self.settings
        augment = find_augmentations(s) if seed is not None else ()
        return Batches(self.data.train, self.data.spec, s.batch_size, self.device, seed, augment)

    def _validation(self) -> Batches:
        """Return the validation examples of all domains; there may be none."""
        held = self.data.validation
        none = torch.empty(0, dtype=torch.long)
        examples = concat(held) if held else self.data.train.subset(none)
        return Batches(examples, self.data.spec, self.settings.batch_size, self.device)

    def reproducible(self) -> Any:
        """Return the context in which a message gives the same numbers every time."""
        seed_torch(self._seed, self.device)
        return torch_threads(self.settings.threads)

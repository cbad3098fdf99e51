"""A Flower app with records, keys and metrics of its own, and Flower's mods, in the style of
app-pytorch and custom-mods."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from sklearn.datasets import load_wine
from torch import nn

local_dp = LocalDpMod(clipping_norm=5.0, sensitivity=0.001, epsilon=10.0, delta=1e-5)


def make_net() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, 12), nn.Tanh(), nn.Linear(12, 3))


def load_part(number: int, of: int):
    table = load_wine()
    order = torch.randperm(len(table.target), generator=torch.Generator().manual_seed(0))
    rows = order[number::of]
    return torch.tensor(table.data)[rows].float(), torch.tensor(table.target)[rows]


app = ClientApp(mods=[fixedclipping_mod, local_dp])


@app.train()
def fit(msg: Message, context: Context):
    net = make_net()
    net.load_state_dict(msg.content["weights"].to_torch_state_dict())
    x, y = load_part(context.node_config["partition-id"], context.node_config["num-partitions"])
    optimizer = torch.optim.Adam(net.parameters(), lr=msg.content["fit-config"]["lr"])
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    net.eval()
    correct = int((net(x).argmax(1) == y).sum())
    content = RecordDict(
        {
            "weights": ArrayRecord(net.state_dict()),
            "fit-metrics": MetricRecord({"size": len(x), "acc": correct / len(x)}),
            "about-me": ConfigRecord({"hardware": "cpu", "epochs": [1, 2, 3]}),
        }
    )
    return Message(content=content, reply_to=msg)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    inner = FedAvg(
        fraction_evaluate=0.0,
        weighted_by_key="size",
        arrayrecord_key="weights",
        configrecord_key="fit-config",
    )
    strategy = DifferentialPrivacyClientSideFixedClipping(
        inner, noise_multiplier=0.001, clipping_norm=20.0, num_sampled_clients=2
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_net().state_dict()),
        train_config=ConfigRecord({"lr": 0.01}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")

"""A Flower app with scikit-learn on a table, in the style of sklearn-logreg-mnist."""

import warnings

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression


def load_data(partition_id: int, num_partitions: int):
    table = load_digits()
    rows = slice(partition_id, None, num_partitions)
    return (table.data[rows] / 16).astype(np.float32), table.target[rows]


def create_model() -> LogisticRegression:
    model = LogisticRegression(max_iter=5, warm_start=True)
    model.classes_ = np.arange(10)
    model.coef_ = np.zeros((10, 64), dtype=np.float32)
    model.intercept_ = np.zeros(10, dtype=np.float32)
    return model


app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    model = create_model()
    model.coef_, model.intercept_ = msg.content["arrays"].to_numpy_ndarrays()
    x, y = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a few iterations do not converge, nor need they
        model.fit(x, y)
    metrics = MetricRecord({"train_acc": model.score(x, y), "num-examples": len(x)})
    arrays = ArrayRecord([model.coef_.astype(np.float32), model.intercept_.astype(np.float32)])
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    model = create_model()
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([model.coef_, model.intercept_]),
        num_rounds=context.run_config["num-server-rounds"],
    )
    arrays = [torch.from_numpy(array.copy()) for array in result.arrays.to_numpy_ndarrays()]
    torch.save(dict(zip(("coef", "intercept"), arrays, strict=True)), "final_model.pt")

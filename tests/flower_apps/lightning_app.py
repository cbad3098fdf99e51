"""A Flower app with PyTorch Lightning, in the style of quickstart-pytorch-lightning."""

import logging

import lightning as L
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class LitAutoEncoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        z = self.encoder(x)
        return nn.functional.mse_loss(self.decoder(z), x)

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def load_data(partition_id: int, num_partitions: int):
    pixels = torch.tensor(load_digits().data[partition_id::num_partitions] / 16).float()
    train, val = TensorDataset(pixels[:160]), TensorDataset(pixels[160:200])
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=32)


def trainer(max_epochs: int) -> L.Trainer:
    return L.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    model = LitAutoEncoder()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    trainloader, valloader = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    trainer(context.run_config["local-epochs"]).fit(model, trainloader, valloader)
    metrics = MetricRecord({"num-examples": len(trainloader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_evaluate=0.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(LitAutoEncoder().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")

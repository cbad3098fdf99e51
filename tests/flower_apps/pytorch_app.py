"""A Flower app with plain PyTorch, in the style of Flower's quickstart-pytorch."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 12, 3, padding=1)
        self.fc1 = nn.Linear(12 * 2 * 2, 24)
        self.fc2 = nn.Linear(24, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def load_data(partition_id: int, num_partitions: int):
    digits = load_digits()
    images = torch.tensor(digits.images[partition_id::num_partitions] / 16).float().unsqueeze(1)
    labels = torch.tensor(digits.target[partition_id::num_partitions])
    part = TensorDataset(images[:200], labels[:200]), TensorDataset(images[200:], labels[200:])
    return DataLoader(part[0], batch_size=32, shuffle=True), DataLoader(part[1], batch_size=64)


client_app = ClientApp()


@client_app.train()
def train(msg: Message, context: Context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    trainloader, _ = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=msg.content["config"]["lr"], momentum=0.9)
    model.train()
    running_loss = 0.0
    for _ in range(context.run_config["local-epochs"]):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    metrics = {"train_loss": running_loss, "num-examples": len(trainloader.dataset)}
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    )
    return Message(content=content, reply_to=msg)


@client_app.evaluate()
def evaluate(msg: Message, context: Context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, valloader = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    model.eval()
    correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in valloader)
    metrics = {
        "eval_acc": correct / len(valloader.dataset),
        "num-examples": len(valloader.dataset),
    }
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    global_model = Net()
    strategy = FedAvg(fraction_train=1.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(global_model.state_dict()),
        train_config=ConfigRecord({"lr": 0.05}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")

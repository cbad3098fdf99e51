"""A Flower app with a Hugging Face transformer, in the style of quickstart-huggingface."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from transformers import BertConfig, BertForSequenceClassification


def get_model():
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def load_batches(partition_id: int):
    """Sentences of up to ten words; the label says whether the first word is a rare one."""
    draw = torch.Generator().manual_seed(partition_id)
    for _ in range(6):
        ids = torch.randint(1, 40, (16, 10), generator=draw)
        lengths = torch.randint(4, 11, (16, 1), generator=draw)
        mask = (torch.arange(10) < lengths).long()
        yield {"input_ids": ids * mask, "attention_mask": mask, "labels": (ids[:, 0] > 20).long()}


app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    model = get_model()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict(), strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    total = 0.0
    for batch in load_batches(context.node_config["partition-id"]):
        outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += outputs.loss.item()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"train_loss": total, "num-examples": 96}),
        }
    )
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = get_model()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict(), strict=True)
    model.eval()
    with torch.no_grad():
        losses = [model(**batch).loss for batch in load_batches(100)]
    metrics = MetricRecord({"val_loss": float(sum(losses)), "num-examples": 96})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    global_model = get_model()
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.5)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(global_model.state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")

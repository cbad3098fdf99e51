"""MLflow: logs to ``MLFLOW_TRACKING_URI``, by default MLflow's store in the working folder."""

from collections.abc import Mapping
from pathlib import Path

from hfedatm.base.resolving import as_config
from hfedatm.base.settings import Settings
from hfedatm.contracts import Tracker


class MLflow(Tracker):
    """Log to the experiment that ``MLFLOW_EXPERIMENT_NAME`` names, under the run's name."""

    package, extra = "mlflow", "mlflow"

    def __init__(self, settings: Settings, folder: Path, done: int = 0) -> None:
        import mlflow

        self._mlflow = mlflow
        kept = folder / "mlflow-run"  # so that a resumed run continues its own curves
        run = mlflow.start_run(
            run_id=kept.read_text(encoding="utf-8") if done and kept.is_file() else None,
            run_name=folder.name,
        )
        kept.write_text(run.info.run_id, encoding="utf-8")
        if not done:
            mlflow.log_params({k: v for k, v in as_config(settings).items() if v != ""})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point per curve."""
        self._mlflow.log_metrics({_name(k): v for k, v in values.items()}, step=step)

    def finish(self, values: Mapping[str, float]) -> None:
        """Log the outcome and end the run."""
        self._mlflow.log_metrics({f"outcome/{_name(k)}": v for k, v in values.items()})
        self._mlflow.end_run()


def _name(path: str) -> str:
    """Return a name MLflow allows: letters, digits, and ``_ - . /`` and spaces."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in path)

"""The section ``log`` of the configuration, and whether its addresses can be used, and hold no secret: config.toml and
checkpoints keep them.
"""

import importlib.util
import ipaddress
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Endpoint(NamedTuple):
    """Where Prometheus asks."""

    address: str = "127.0.0.1"
    """An IP address."""
    port: int = 9464
    """0: a free one."""

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def read_endpoint(text: str) -> Endpoint | None:
    """``log.prometheus``; None where it names none, or what is no address and port."""
    if text == "endpoint":
        return Endpoint()
    found = re.fullmatch(r"(?:\[(\S+)\]|([^\s:]+)):(\d{1,5})", text, re.ASCII)
    if found is None or int(found[3]) >= 1 << 16:
        return None
    try:
        return Endpoint(str(ipaddress.ip_address(found[1] or found[2])), int(found[3]))
    except ValueError:
        return None


@dataclass(kw_only=True, slots=True, frozen=True)
class LogConfig:
    """What is written about the run, and where."""

    log_interval: int = 10
    """Iterations between lines on the console and in metrics.jsonl."""

    log_params_norm: bool = False
    """Log the L2 norm of all weights: a pass over them per line."""

    log_num_zeros_in_grad: bool = False
    """Log how many elements of the gradient are 0: a pass over it per line."""

    layer_stats_interval: int | None = None
    """Iterations between lines that also have, block by block, norms of weights and gradients and the size of outputs;
    a multiple of log_interval. None: never."""

    tensorboard: bool = True
    """Write TensorBoard events into run_dir/events."""

    report: bool = True
    """Write run_dir/report.html whenever the run ends: a second or two, by a process of its own."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; the key comes from the environment and is never written."""

    wandb_project: str = "triplane"
    """Project that the run appears under."""

    wandb_name: str | None = None
    """Name that the run appears under. None: the run folder's name."""

    mlflow: str = "off"
    """MLflow: "offline" (a file store in run_dir/mlflow) or a tracking URI, such as http://host:5000. User and password
    come from the environment (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD)."""

    mlflow_experiment: str = "triplane"
    """Experiment that the run, named after its folder, appears under."""

    prometheus: str = "textfile"
    """textfile: run_dir/metrics.prom, for node_exporter's textfile collector. 127.0.0.1:9464, or another address and
    port (0: a free one, which the console names): that and an endpoint on rank 0's node, which asks for no password, so
    that whoever reaches another address than loopback's reads it; endpoint: at 127.0.0.1:9464. off: neither."""

    names: Literal["triplane", "megatron"] = "triplane"
    """Of curves in TensorBoard, wandb and MLflow: metrics.jsonl's keys, or Megatron-LM's names and units where it has
    them, for dashboards that were made for it."""

    ranks: Literal["node", "all"] = "node"
    """One log file per node, or one per rank. The rank that failed first always gets a file of its own."""

    @property
    def endpoint(self) -> Endpoint | None:
        """Where Prometheus may ask; None: nowhere."""
        return read_endpoint(self.prometheus)

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        found = []
        every = self.layer_stats_interval
        if self.log_interval < 1:
            found.append(f"log.log_interval must be 1 or more, found {self.log_interval}.")
        elif every is not None and (every < 1 or every % self.log_interval):
            found.append(
                f"log.layer_stats_interval must be a multiple of log.log_interval, {self.log_interval}, found {every}."
            )
        if self.prometheus not in ("off", "textfile") and self.endpoint is None:
            found.append(
                'log.prometheus must be "off", "textfile", "endpoint" or an IP address and a port, such as '
                f'"127.0.0.1:9464", found "{self.prometheus}".'
            )
        return found + mlflow_problems(self.mlflow)


URI = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<user>[^/?#]*@)?(?P<rest>[^?#]*)(?P<query>.*)", re.DOTALL)


def mlflow_problems(mlflow: str) -> list[str]:
    """What is wrong with ``log.mlflow``."""
    if mlflow == "off":
        return []
    uri = URI.fullmatch(mlflow)
    if mlflow != "offline" and uri is None:
        return [f'log.mlflow must be "off", "offline" or a tracking URI such as http://host:5000, found "{mlflow}".']
    if uri and (uri["user"] or uri["query"]):
        return [
            "log.mlflow holds a user, a password or a query, which config.toml and every checkpoint would keep. Write "
            f"{uri['scheme']}://{uri['rest']} and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN, in the environment."
        ]
    if importlib.util.find_spec("mlflow") is None:
        return ["log.mlflow needs mlflow: pip install mlflow-skinny, or set it to off."]
    return []

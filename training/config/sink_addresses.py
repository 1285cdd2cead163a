"""Whether the ``log`` section's addresses can be used, and hold no secret: config.toml and checkpoints keep them."""

import importlib.util
import ipaddress
import re

URI = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<user>[^/?#]*@)?(?P<rest>[^?#]*)(?P<query>.*)", re.DOTALL)


def sink_problems(mlflow: str, prometheus_address: str, prometheus_port: int) -> list[str]:
    """One message each; a secret is not repeated in one."""
    found = mlflow_problems(mlflow)
    try:
        ipaddress.ip_address(prometheus_address)
    except ValueError:
        found.append(
            f'log.prometheus_address must be an IP address, such as 127.0.0.1 or 0.0.0.0, found "{prometheus_address}".'
        )
    if not 0 <= prometheus_port < 1 << 16:
        found.append(f"log.prometheus_port must be 0 to 65535, found {prometheus_port}.")
    return found


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

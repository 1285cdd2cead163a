"""transformers' classes, imported once by a process that then forks."""

from collections.abc import Iterable

from models.hf.shapes import write_config
from models.shapes import GPTShape


def import_models(shapes: Iterable[GPTShape]) -> None:
    """Those of these architectures."""
    import transformers
    import transformers.core_model_loading
    import transformers.modeling_layers

    for shape in shapes:
        (name,) = write_config(shape)[1]["architectures"]
        getattr(transformers, name)

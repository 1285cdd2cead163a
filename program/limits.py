"""How small the numbers of a section or of a command's flags may be."""


def too_small(of: object, prefix: str, least: float | None, *names: str) -> list[str]:
    """A sentence for each of these fields that is less. least: None: above 0. A field that is None is not given."""
    wanted = "above 0" if least is None else f"{least} or more"
    given = {name: value for name in names if (value := getattr(of, name)) is not None}
    return [
        f"{prefix}{name} must be {wanted}, found {value}."
        for name, value in given.items()
        if (value <= 0 if least is None else value < least)
    ]

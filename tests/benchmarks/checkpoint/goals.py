"""A measured ratio beside its goal."""


def ratio(name: str, value: float, goal: float, *, most: bool = False) -> str:
    """A line with its goal: at least it, or with ``most`` at most."""
    met = value <= goal if most else value >= goal
    return f"  {name:42} {value:8.3f}   goal {'<=' if most else '>='} {goal:.2f}: {'met' if met else 'MISSED'}"

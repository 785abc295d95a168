"""What a user wrote for the runs `custom` and `transformed`."""


def documents(config, split):
    """Two texts, fewer than the rows of a batch."""
    return ["one fish, two fish, red fish, blue fish, " * 3, "a text of its own, which is longer than a row"]


def transform(rows):
    """Leaves the first token of each document out of the loss."""
    return {**rows, "loss_mask": rows["loss_mask"] * (rows["positions"] > 0)}

"""Describes how many of a run's conversations are cut or lack an end token, and which tokens count in the loss."""

import numpy as np

from src.data.document_stream import DocumentStream
from src.data.types import InputSpec, RowSource, TrainData

_CONVERSATIONS_LOOKED_AT = 256  # of each source


def describe_conversations(inputs: InputSpec, data: TrainData) -> str:
    """Describes in a sentence how many of the first conversations are cut or lack an end token, and which tokens count.

    They are tokenized for this, so a malformed one raises UserError.
    """
    looked_at = cut = rewritten = endless = 0
    assert inputs.tokenizer
    stops = list(inputs.tokenizer.stop_ids)
    for name, source in zip(data.names, data.sources, strict=True):
        assert not isinstance(source, RowSource)
        stream = DocumentStream(inputs, source, name)
        for ordinal in range(min(len(source), _CONVERSATIONS_LOOKED_AT)):
            documents = stream.documents(ordinal)
            looked_at += 1
            rewritten += len(documents) > 1
            cut += any(len(document.ids) - 1 > inputs.batch.max_target_length for document in documents)
            counts = (np.isin(each.ids, stops) & (each.loss_mask is None or each.loss_mask) for each in documents)
            endless += not any(map(np.any, counts))
    longer = f"{cut:,} of {looked_at:,} looked at are longer than a row of {inputs.batch.max_target_length:,} and cut"
    end = f"; {endless:,} have no end token, so that the model does not learn to stop" * bool(endless)
    if not inputs.data.sft_train_on_completion_only:
        return f"{longer}; all tokens count{end}"
    turns = f", in {rewritten:,} each turn in an example of its own: the template rewrites earlier turns"
    return f"{longer}; what the assistant says counts{turns if rewritten else ''}{end}"

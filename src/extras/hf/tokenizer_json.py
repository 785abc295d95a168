"""Exports tokenizers for transformers: tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from src.data.tokenizer import ByteTokenizer
from src.extras.hf.sentencepiece_tokenizer import SentencePieceTokenizer
from src.system.errors import UserError

_SPACE = "▁"  # SentencePiece's symbol for a space
_BPE = sentencepiece_model_pb2.TrainerSpec.ModelType.BPE
_PIECE = sentencepiece_model_pb2.ModelProto.SentencePiece
_TYPES = (_PIECE.NORMAL, _PIECE.UNKNOWN, _PIECE.CONTROL, _PIECE.BYTE)


def save_tokenizer(folder: Path, tokenizer: ByteTokenizer | SentencePieceTokenizer) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which give transformers the same ids for a text as `tokenizer`.

    A text begins with bos and does not end with eos, like a prompt. Special tokens spelled in a text stay plain text.
    Raises UserError if tokenizer.json can't represent the tokenizer.
    """
    is_bytes = isinstance(tokenizer, ByteTokenizer)
    fast, bos, eos = _of_bytes(tokenizer) if is_bytes else _of_sentencepiece(tokenizer)
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (bos, eos)])
    fast.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, fast.token_to_id(bos))]
    )
    fast.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    settings |= {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _of_bytes(tokenizer: ByteTokenizer) -> tuple[tokenizers.Tokenizer, str, str]:
    # Byte -> character table (GPT-2, section 2.2): printable bytes map to themselves.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}
    fast = tokenizers.Tokenizer(models.BPE({**vocab, "<bos>": tokenizer.bos, "<eos>": tokenizer.eos}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return fast, "<bos>", "<eos>"


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> tuple[tokenizers.Tokenizer, str, str]:
    """Converts a BPE model with byte fallback that preserves the text, such as src.train_tokenizer's.

    Also returns bos and eos. Raises UserError for any other model.
    """
    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == _PIECE.NORMAL}
    reasons = {
        "it is not a BPE model": trainer.model_type != _BPE,
        "it has no byte fallback": not trainer.byte_fallback,
        "it normalizes text": bool(normalizer.precompiled_charsmap) or normalizer.remove_extra_whitespaces,
        "it puts spaces at the ends of words": trainer.treat_whitespace_as_suffix,
        "it keeps spaces": not normalizer.escape_whitespaces,
        "it has user-defined pieces": any(piece.type not in _TYPES for piece in model.pieces),
        "it has pieces with characters that are not pieces": any(
            char not in scores for piece in scores for char in piece
        ),
    }
    if any(reasons.values()):
        listed = ", ".join(reason for reason, applies in reasons.items() if applies)
        raise UserError(f"tokenizer.json can't represent this SentencePiece model: {listed}")

    # SentencePiece merges the neighbors that form the piece with the highest score; list the merges in that order.
    splits = [
        (piece[:i], piece[i:]) for piece in sorted(scores, key=lambda p: -scores[p]) for i in range(1, len(piece))
    ]
    merges = [(left, right) for left, right in splits if left in scores and right in scores]
    vocab = {piece.piece: index for index, piece in enumerate(model.pieces)}
    unknown = model.pieces[trainer.unk_id].piece
    fast = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unknown, byte_fallback=True))
    prefix = normalizer.add_dummy_prefix
    fast.normalizer = normalizers.Sequence([*[normalizers.Prepend(_SPACE)] * prefix, normalizers.Replace(" ", _SPACE)])
    fast.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *[decoders.Strip(" ", 1, 0)] * prefix]
    )
    return fast, model.pieces[tokenizer.bos].piece, model.pieces[tokenizer.eos].piece

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.data.sentencepiece_tokenizer import SentencePieceTokenizer
from src.data.tokenizer import ByteTokenizer, make_tokenizer
from src.extras.datasets.train_tokenizer import train
from src.system.errors import UserError

CODE = "class A:\n    def f(self,  x):\n\tif x:\n\t\treturn 'é漢😀'\n\n\n        # end  \n\r\n"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    path.write_bytes(train([CODE] * 3 + [f"    return self.x{n}\n" for n in range(50)], 300))
    return path


def test_byte_ids_are_the_bytes_between_bos_and_eos():
    ids = ByteTokenizer().encode("hé")
    assert ids.dtype == np.int32
    assert ids.tolist() == [256, ord("h"), 0xC3, 0xA9, 257]


@given(st.text())
def test_byte_decodes_what_it_encodes(text):
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


def test_byte_decodes_half_a_character_and_padded_ids():
    assert ByteTokenizer().decode(np.array([256, 65, 0xC3, 66, 300, 257])) == "A�B"


def test_sentencepiece_round_trip_of_code(model_path):
    tokenizer = SentencePieceTokenizer(str(model_path))
    ids = tokenizer.encode(CODE)
    assert ids.dtype == np.int32
    assert (ids[0], ids[-1]) == (tokenizer.bos, tokenizer.eos)
    assert tokenizer.bos not in ids[1:]
    assert tokenizer.decode(ids) == CODE
    assert len(ids) < len(CODE.encode())  # it found pieces


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\u2581")))
def test_sentencepiece_decodes_what_it_encodes(model_path, text):
    tokenizer = SentencePieceTokenizer(str(model_path))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_ids_beyond_its_vocabulary_give_no_text(model_path):
    tokenizer = SentencePieceTokenizer(str(model_path))
    ids = [*tokenizer.encode("x")[1:-1], tokenizer.vocab_size, tokenizer.vocab_size + 5]
    assert tokenizer.decode(np.array(ids)) == "x"


def test_fingerprints_tell_tokenizers_apart(model_path, tmp_path):
    other = tmp_path / "other.model"
    other.write_bytes(train([CODE] * 5, 300))
    prints = [SentencePieceTokenizer(str(path)).fingerprint() for path in (model_path, other)]
    assert prints[0] != prints[1]
    assert ByteTokenizer().fingerprint() not in prints


@pytest.fixture
def make(config):
    """Opens the tokenizer of a config with these keys."""

    def opened(**keys):
        settings = config(**keys)
        return make_tokenizer(settings.data, settings.model.vocab_size)

    return opened


def test_make_tokenizer_takes_the_kind_the_config_names(make, model_path):
    assert isinstance(make(), ByteTokenizer)
    made = make(tokenizer_type="sentencepiece", tokenizer_path=str(model_path), vocab_size=300)
    assert made.vocab_size == 300
    assert make(dataset_type="synthetic", vocab_size=8) is None


def test_more_ids_than_vocab_size_is_an_error(make, model_path):
    with pytest.raises(UserError, match=r"vocab_size=257 .*258 ids.*vocab_size=258"):
        make(vocab_size=257)
    with pytest.raises(UserError, match=r"vocab_size=299 .*300 ids.*vocab_size=300"):
        make(tokenizer_type="sentencepiece", tokenizer_path=str(model_path), vocab_size=299)


def test_missing_or_unfit_model_file_is_an_error(make, tmp_path):
    broken = tmp_path / "broken.model"
    broken.write_bytes(b"not a model")
    for path, message in ((tmp_path / "none.model", "no such file"), (broken, "not a SentencePiece model")):
        with pytest.raises(UserError, match=message) as error:
            make(tokenizer_type="sentencepiece", tokenizer_path=str(path))
        assert f"tokenizer_path={path}" in str(error.value)
    with pytest.raises(UserError, match="train_tokenizer"):
        make(tokenizer_type="sentencepiece")

"""The families, in the order in which they are tried for a model that is written."""

from src.hf.families.gpt2 import GPT2
from src.hf.families.llama import LLAMA
from src.hf.families.mistral import MISTRAL
from src.hf.family import Family

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, GPT2)

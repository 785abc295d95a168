"""Lists the families in the order in which an export tries them."""

from src.hf.families.deepseek import DEEPSEEK2, DEEPSEEK3
from src.hf.families.gemma import GEMMA, GEMMA2, GEMMA3
from src.hf.families.gpt2 import GPT2
from src.hf.families.gpt_oss import GPT_OSS
from src.hf.families.llama import LLAMA
from src.hf.families.llama4 import LLAMA4
from src.hf.families.mistral import MISTRAL, MIXTRAL
from src.hf.families.olmo2 import OLMO2
from src.hf.families.qwen3 import QWEN3, QWEN3_MOE
from src.hf.family import Family

# fmt: off
FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, MIXTRAL, QWEN3, QWEN3_MOE, OLMO2, GEMMA, GEMMA2, GEMMA3, LLAMA4, DEEPSEEK2, DEEPSEEK3, GPT_OSS,
    GPT2,
)
# fmt: on

"""Lists the families, in the order in which an export tries them."""

from src.extras.hf.families.deepseek import DEEPSEEK2, DEEPSEEK3
from src.extras.hf.families.gemma import GEMMA, GEMMA2, GEMMA3
from src.extras.hf.families.gemma4 import GEMMA4
from src.extras.hf.families.glm4 import GLM, GLM4, GLM4_MOE
from src.extras.hf.families.gpt2 import GPT2
from src.extras.hf.families.gpt_oss import GPT_OSS
from src.extras.hf.families.llama import GRANITE, LLAMA, PHI3, SMOLLM3
from src.extras.hf.families.llama4 import LLAMA4
from src.extras.hf.families.mistral import MISTRAL, MIXTRAL
from src.extras.hf.families.olmo2 import OLMO2, OLMO3
from src.extras.hf.families.qwen3 import QWEN2, QWEN3, QWEN3_MOE, QWEN3_NEXT
from src.extras.hf.family import Family

# fmt: off
FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, OLMO2, OLMO3, GEMMA, GEMMA2, GEMMA3, LLAMA4, DEEPSEEK2, DEEPSEEK3,
    GEMMA4, GPT_OSS, GPT2, PHI3, SMOLLM3, GRANITE, GLM, GLM4, GLM4_MOE, QWEN3_NEXT,
)
# fmt: on

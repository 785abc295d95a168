"""Lists the keys that src.train_dpo, src.decode and src.evaluate do not read; files for other commands may set them."""

from src.config.keys import ABOVE_0, FROM_1
from src.config.requirements import EMPTY, IS_SET, SAMPLING, Lists, Requires
from src.config.schema import KEYS

_OF_TOKENIZER = ("dataset_type", "tokenizer_type", "tokenizer_path")
_DATA = [name for name, key in KEYS.items() if key.section == "data" and name not in _OF_TOKENIZER]
_SAVING = [name for name, key in KEYS.items() if key.section == "checkpoint" and not name.startswith("load_")]
# Groups of base.yml that only training reads.
_TITLES = ("Optimizer", "Loss, gradients and safeguards", "Finetuning: the weights", "Diagnostics")
_OF_TRAINING = (
    *(name for name, key in KEYS.items() if key.group in _TITLES and not key.commands),
    *("steps", "log_period", "quiet", "dropout_rate", "remat_policy", "remat_custom", "load_full_state_path"),
    *("bwd_quantization_calibration_method", "eval_interval", "eval_mode", *_SAVING),
)
_TO_SCORE = ("texts_path", "tokens_path", "tasks")  # src.evaluate: instead of evaluation data
_TRAINING_DATA = "train_split datasets"  # not dataset_name, without which checks refuse dataset_type=tfds
_WITH_PATH = ("tfds", "array_record", "parquet", "hf", "tokens")

# By command, the keys that it reads only with one of the given settings, or never if no settings are given. A key in
# `Lists` is ignored with a note, a key in `Requires` as `Key.ignored` says. src.train has `requirements.OF_TRAIN`.
UNREAD: dict[str, tuple[Requires, ...]] = {
    "src.train_dpo": (
        Requires("use_sft sft_train_on_completion_only dataset_column max_document_bytes sample_length"),
        Requires("decode_metrics compiled_trainstep_file pgle pgle_profile packing long_documents"),
        Lists([*SAMPLING, "decode_samples", "decode_prompt_tokens", "decode_num_prompts"]),
        Lists("eval_steps eval_fraction", eval_interval=FROM_1),  # other eval keys are read for the reference too
    ),
    "src.decode": (
        Lists(_OF_TRAINING),
        Lists("packing long_documents batch_transform data_threads eval_fraction sft_train_on_completion_only"),
        Lists("eval_steps eval_per_device_batch_size eval_metrics"),
        Lists("run_name base_output_directory num_vocab_tiling"),
        Requires("decode_samples decode_prompt_tokens decode_num_prompts", decode_path=IS_SET),
        Lists(_DATA, decode_prompt_tokens=ABOVE_0),
        Lists(_DATA, decode_path=IS_SET),
        # dataset_type=synthetic is read in any case: it is refused, because prompts need a tokenizer.
        Lists("dataset_type", decode_prompt_tokens=ABOVE_0, dataset_type="synthetic"),
        Lists("dataset_type", decode_path=IS_SET, dataset_type="synthetic"),
        Lists("prompt", prompt_path=EMPTY),
        Lists("prompt", interactive=False),
        Lists("prompt", decode_prompt_tokens=0, decode_path=EMPTY),
    ),
    "src.evaluate": (
        Lists(_OF_TRAINING),
        Lists("prompt sample_length max_prefill_predict_length decode_samples decode_prompt_tokens decode_stop"),
        Lists("decode_sampling_strategy decode_sampling_temperature decode_sampling_top_k"),
        Lists("decode_sampling_nucleus_p decode_num_prompts"),
        Lists("use_chat_template decode_seed", tasks=IS_SET),
        # They name the run whose data rules an evaluation follows; scores and tasks need none.
        *(Lists("run_name base_output_directory", **{key: EMPTY}) for key in _TO_SCORE),
        *(
            Lists(
                [*_DATA, "packing", "long_documents", "batch_transform", "eval_steps", "eval_metrics"], **{key: EMPTY}
            )
            for key in _TO_SCORE
        ),
        *(Lists("dataset_type", **{key: EMPTY}, dataset_type="synthetic") for key in _TO_SCORE),
        # TFDS finds evaluation data in the same folder, and checks refuse the other types without a path.
        Lists("dataset_path", dataset_type=_WITH_PATH, eval_dataset_path=EMPTY),
        Lists("dataset_path", dataset_type=_WITH_PATH, eval_datasets=EMPTY),
        Lists(_TRAINING_DATA, eval_dataset_path=EMPTY),
        Lists(_TRAINING_DATA, eval_dataset_name=EMPTY, dataset_type="hf"),  # a stream, of which nothing is held out
        Lists(_TRAINING_DATA, eval_datasets=EMPTY),
    ),
}

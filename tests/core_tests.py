"""The fast loop, `pytest -m core`: for each core folder, the files of tests that find most mistakes in little time."""

FOLDERS = {  # of src/
    "config": ("config/test_config.py", "config/test_config_checks.py", "config/test_requirements.py"),
    "parallel": ("parallel/test_mesh.py",),
    "model": ("model/test_spec.py", "model/test_facts.py", "model/test_decoder.py"),
    "step": ("step/test_train_step.py", "step/test_optimizer.py"),
    "data": ("data/test_order.py", "data/test_packing.py", "data/test_loader.py", "data/test_held_out.py"),
    "checkpoint": ("checkpoint/test_checkpoint.py", "checkpoint/test_digest.py", "checkpoint/test_run_folder.py"),
    "run": ("test_run.py", "test_train.py"),  # runs and resumed runs
    "system": ("test_errors.py",),
}
FILES = frozenset(("test_structure.py", *(name for names in FOLDERS.values() for name in names)))

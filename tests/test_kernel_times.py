"""scripts/kernel_times.py on a profile written by hand."""

import json

import jax
import pytest

from scripts import kernel_times

# Name, begin and duration in microseconds, on two streams; the second GPU is not read.
STREAMS = {
    "/device:GPU:0": {
        "Stream #14(Compute)": [
            ("nvjet_sm90_tst_128x256", 0, 40),
            ("cudnn_generated_sdpa_bprop", 40, 30),
            ("loop_add_fusion", 80, 20),
            ("nvjet_sm90_tst_128x256", 150, 50),
        ],
        "Stream #20(Compute)": [("ncclDevKernel_AllGather", 90, 40)],
        "XLA Ops": [("not a kernel", 0, 900)],
    },
    "/device:GPU:1": {"Stream #14(Compute)": [("loop_add_fusion", 0, 5000)]},
    "/host:CPU": {"Stream of Python": [("step", 0, 9000)]},
}


def profile(folder):
    """A file of XSpace, the format of `profiler=xplane`, of STREAMS."""
    text = ""
    for plane, lines in STREAMS.items():
        names = sorted({name for events in lines.values() for name, *_ in events})
        inner = "".join(
            f'event_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }}\n'
            for number, name in enumerate(names, start=1)
        )
        for line, events in lines.items():
            of_line = "".join(
                f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {begin * 10**6} "
                f"duration_ps: {duration * 10**6} }}\n"
                for name, begin, duration in events
            )
            inner += f'lines {{ name: "{line}" timestamp_ns: 7000 {of_line} }}\n'
        text += f'planes {{ name: "{plane}" {inner} }}\n'
    path = folder / "tensorboard" / "plugins" / "a.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))


def test_a_steps_time_is_summed_by_kind(tmp_path, capsys):
    profile(tmp_path)
    assert kernel_times.main([str(tmp_path), "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["step_ms"] == pytest.approx(0.1)
    assert found["idle_ms"] == pytest.approx((10 + 20) / 2000)  # from 70 to 80 and from 130 to 150
    kinds = {"matmuls": 0.045, "communication": 0.02, "attention": 0.015, kernel_times.OTHER: 0.01}
    assert found["kinds_ms"] == pytest.approx(kinds)
    assert next(iter(found["kernels_ms"])) == "nvjet_sm90_tst_128x256"


def test_a_folder_without_a_profile_is_refused(tmp_path, capsys):
    assert kernel_times.main([str(tmp_path)]) == 2
    assert "there is no *.xplane.pb" in capsys.readouterr().err


def test_a_profile_without_a_gpu_is_refused(tmp_path, capsys):
    text = 'planes { name: "/host:CPU" lines { name: "Stream" } }'
    (tmp_path / "a.xplane.pb").write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))
    assert kernel_times.main([str(tmp_path)]) == 2
    assert "has no kernels of a GPU" in capsys.readouterr().err

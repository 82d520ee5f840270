"""tools/stages.py: means of what a run logged, in tenths of the run."""

import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "tools"))
import stages


@pytest.mark.parametrize("resumed", [False, True])
def test_each_tenth_has_the_means_of_its_points(resumed, tmp_path, monkeypatch):
    """An episode of return s at every step s, and a KL of s at every tenth step."""
    (tmp_path / "args.json").write_text('{"total_timesteps": 1000}')
    points = [(s, s, 10.0, s if s % 10 == 0 else None, None) for s in range(1, 1001)]
    segments = {"a": ({"start_time": "1"}, points), "b": ({"start_time": "2"}, points[499:])}
    if resumed:
        segments["a"] = ({"start_time": "1"}, points[:600])
    for name in segments if resumed else "a":
        (tmp_path / f"wandb/offline-run-{name}").mkdir(parents=True)
        (tmp_path / f"wandb/offline-run-{name}/run-{name}.wandb").touch()
    asked = ["charts/episodic_return", "charts/episodic_length", "losses/kl", "losses/entropy"]

    def inspect(path, keys):
        assert keys == asked
        return segments[path.name[-1]]

    monkeypatch.setattr(sys.modules["report"], "inspect", inspect)
    means = stages.stages(tmp_path)
    assert means.index.tolist() == [f"{n}00" for n in range(1, 10)] + ["1k"]
    np.testing.assert_allclose(means["return"], 100 * np.arange(10) + 50.5)
    np.testing.assert_allclose(means["KL"], 100 * np.arange(10) + 55)
    assert set(means["length"]) == {10} and means["entropy"].isna().all()

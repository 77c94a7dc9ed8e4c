import pytest


def test_the_environment_variable_names_the_reference_folder(reference_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FULGURITE_REFERENCE", str(tmp_path))
    (tmp_path / "rocp").mkdir()
    assert reference_folder("rocp") == tmp_path / "rocp"


def test_a_missing_reference_folder_skips_with_the_reason(reference_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FULGURITE_REFERENCE", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"no reference vectors in .*rocp; set FULGURITE_REFERENCE"):
        reference_folder("rocp")

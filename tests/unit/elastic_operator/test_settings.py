"""Settings of the operator: every mistake on the command line is named with its option before anything starts."""

from __future__ import annotations

import pytest

from elastic_operator.settings import Settings, read_settings


def test_no_option_is_needed() -> None:
    settings = read_settings(["run"], {"HOSTNAME": "x", "HOME": "/nowhere"})
    assert isinstance(settings, Settings)
    assert (settings.metrics_port, settings.lease_namespace, settings.limits.resync_seconds) == (0, "default", 30.0)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--metrics-port=70000", "--metrics-port is 70000: expected a whole number from 0 to 65535"),
        ("--health-port=-1", "--health-port is -1: expected a whole number from 0 to 65535"),
        ("--namespace=ok,Not_OK", "--namespace is 'Not_OK': expected the name of a namespace"),
        ("--lease-namespace=a/b", "--lease-namespace is 'a/b': expected the name of a namespace"),
        ("--lease-name=", "--lease-name is '': expected the name of an object"),
        ("--heartbeat-seconds=0", "--heartbeat-seconds is 0.0: expected a number from 0.001 to 31536000"),
        ("--resync-seconds=nan", "--resync-seconds is nan: expected a number from 0.001 to 31536000"),
        ("--startup-seconds=inf", "--startup-seconds is inf: expected a number from 0.001 to 31536000"),
        ("--startup-seconds=1e-300", "--startup-seconds is 1e-300: expected a number from 0.001 to 31536000"),
        ("--lease-name=a..b", "--lease-name is 'a..b': expected the name of an object"),
        ("--namespace=,,", "--namespace is ',,': expected the name of a namespace"),
        ("--kubeconfig=~nosuchuser/x", "--kubeconfig is '~nosuchuser/x': expected a path"),
        ("--stop-grace-seconds=-1", "--stop-grace-seconds is -1: expected a whole number from 0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_option(
    option: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(["run", option], {})
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_all_mistakes_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["run", "--metrics-port=-5", "--node-stable-seconds=-2"], {})
    message = capsys.readouterr().err
    assert "--metrics-port" in message
    assert "--node-stable-seconds" in message

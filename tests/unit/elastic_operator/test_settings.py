"""Settings of the operator: every mistake on the command line is named with its option before anything starts."""

from __future__ import annotations

import pytest

from elastic_operator.reconcile.notifications.formats import Format
from elastic_operator.reconcile.notifications.notification import NotificationKind
from elastic_operator.settings import URL_VARIABLE, NotificationSettings, Settings, read_settings

URL = "https://hooks.example.org/services/T000/verysecret"


def test_no_option_is_needed() -> None:
    settings = read_settings(["run"], {"HOSTNAME": "x", "HOME": "/nowhere"})
    assert isinstance(settings, Settings)
    assert (settings.metrics_port, settings.lease_namespace, settings.limits.resync_seconds) == (0, "default", 30.0)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--metrics-port=70000", "--metrics-port is 70000: expected a whole number from 0 to 65535"),
        ("--health-port=-1", "--health-port is -1: expected a whole number from 0 to 65535"),
        ("--status-page-port=65536", "--status-page-port is 65536: expected a whole number from 0 to 65535"),
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
        ("--notification-format=teams", "--notification-format: invalid choice: 'teams'"),
        ("--notification-kinds=Recovered,Nothing", "--notification-kinds is 'Nothing': expected"),
        ("--notification-kinds=,", "--notification-kinds is ',': expected"),
        ("--notification-source=a b", "--notification-source is 'a b': expected a URI or a part of one"),
        ("--stop-grace-seconds=-1", "--stop-grace-seconds is -1: expected a whole number from 0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_option(
    option: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(["run", option], {URL_VARIABLE: URL})
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_all_mistakes_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["run", "--metrics-port=-5", "--node-stable-seconds=-2"], {})
    message = capsys.readouterr().err
    assert "--metrics-port" in message
    assert "--node-stable-seconds" in message


def test_notifications_are_off_without_a_url() -> None:
    for env in ({}, {URL_VARIABLE: ""}, {URL_VARIABLE: " \n"}):
        settings = read_settings(["run", "--notification-format=cloudevents"], env)
        assert (settings.notifications, settings.lacks_webhook_url) == (None, True)
        assert not read_settings(["run"], env).lacks_webhook_url


def test_notifications_have_their_options() -> None:
    assert read_settings(["run"], {URL_VARIABLE: f"{URL}\n"}).notifications == NotificationSettings(url=URL)
    options = ["--notification-format=cloudevents", "--notification-kinds=Failed,Complete", "--lease-name=blue"]
    assert read_settings(["run", *options], {URL_VARIABLE: URL}).notifications == NotificationSettings(
        url=URL,
        format=Format.CLOUDEVENTS,
        kinds=(NotificationKind.FAILED, NotificationKind.COMPLETE),
        source="blue",
    )
    insecure = read_settings(["run", "--notification-allow-http"], {URL_VARIABLE: "http://receiver.monitoring:8080/x"})
    assert insecure.notifications is not None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://hooks.example.org/verysecret", "expected https://"),
        ("file:///verysecret", "expected https://"),
        ("verysecret", "expected https://"),
        ("https:///verysecret", "with a valid host and port"),
        ("https://hooks.example.org:0/verysecret", "with a valid host and port"),
        ("https://hooks.example.org:verysecret/", "with a valid host and port"),
        ("https://[verysecret/", "with a valid host and port"),
        ("https://me:verysecret@hooks.example.org/", "without user name, password and fragment"),
        ("https://hooks.example.org/#verysecret", "without user name, password and fragment"),
        ("https://hooks.example.org/very secret", "without spaces"),
        ("https://hooks.example.org/verysecret\r\nX: y", "without spaces"),
        ("https://hooks.example.org/\u00e9verysecret", "printable ASCII"),
        (f"https://hooks.example.org/{'verysecret' * 300}", "at most 2048"),
    ],
)
def test_a_url_that_is_refused_is_not_shown(url: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(["run"], {URL_VARIABLE: url})
    message = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert expected in message and URL_VARIABLE in message
    assert "verysecret" not in message and "very secret" not in message


def test_the_url_is_shown_by_nothing_that_describes_the_settings() -> None:
    settings = read_settings(["run"], {URL_VARIABLE: URL})
    assert "verysecret" not in repr(settings)
    assert URL_VARIABLE not in settings.environment, "which credential plugins get"


@pytest.mark.parametrize(
    ("port", "ip", "address"),
    [(8082, "10.1.2.3", "10.1.2.3:8082"), (8082, "fd00::1", "[fd00::1]:8082"), (8082, "", ""), (8082, "x", ""),
     (0, "10.1.2.3", "")],
)  # fmt: skip
def test_the_status_page_is_off_by_default_and_its_address_is_that_of_the_pod(port: int, ip: str, address: str) -> None:
    assert read_settings(["run"], {"POD_IP": ip}).status_page_address == ""
    settings = read_settings(["run", f"--status-page-port={port}"], {"POD_IP": ip})
    assert (settings.status_page_port, settings.status_page_address) == (port, address)

"""Errors of gcloud: printed in its words, and tried again only if that can help."""

import pytest
from row_files import read_table

NEVER = read_table(__file__, "never")


@pytest.mark.parametrize("error", NEVER)
def test_a_permanent_error_ends_the_launch_at_once(cloud, error):
    queued = "Quota" in error
    cloud.plays(create=[{"error": error}])
    assert error in cloud.runs(*["--queued"] * queued, expect=1)
    assert len(cloud.calls("queued-resources" if queued else "tpu-vm", "create")) == 1


def test_an_account_that_may_not_look_is_not_asked_again(cloud):
    error = "There was a problem refreshing your current auth tokens: invalid_grant"
    cloud.plays(unreachable=[error])
    output = cloud.runs(expect=1)
    assert error in output and "another try can't mend that" in output
    assert len(cloud.calls("tpu-vm", "describe")) == 1 and "costs money" not in output


def test_a_lack_of_capacity_is_tried_again(cloud):
    cloud.plays(create=[{"error": "RESOURCE_EXHAUSTED: There is no more capacity in the zone"}, {}])
    output = cloud.runs()
    assert "try 1 of 10: dapo was not created: no capacity now" in output and "done" in output


AGENT = (
    'SSH Key is not present in the SSH agent. Please run "ssh-add /h/k" to add it, and try again.'
)


def test_a_key_that_no_agent_has_is_said_in_gclouds_words_and_ends_at_once(cloud):
    cloud.plays(workers=16, ssh=[AGENT])
    output = cloud.runs(expect=1)
    assert output.count(AGENT) == 2 and "ssh-add ~/.ssh/google_compute_engine" in output
    assert "no answer of worker 0 1 2 3" in output and "can't mend that" in output
    assert len(cloud.calls("tpu-vm", "ssh")) == 1 and not cloud.exists()  # nothing is left to pay


def test_a_key_that_the_machine_does_not_have_yet_is_tried_again(cloud):
    cloud.plays(ssh=["me@1.2.3.4: Permission denied (publickey).", ""])
    output = cloud.runs()
    assert (
        "Permission denied (publickey)" in output and "try 1 of 10" in output and "done" in output
    )


@pytest.mark.parametrize(("key", "agent", "text"), read_table(__file__, "keys"))
def test_a_key_that_can_not_reach_several_workers_costs_nothing(cloud, key, agent, text):
    folder = cloud.folder / ".ssh"
    folder.mkdir()
    if key:
        (folder / "google_compute_engine").write_text(key)
    if agent:
        (cloud.folder / "agent").write_text(agent)
    assert text in cloud.runs("--type=v6e-16", expect=1) and not cloud.calls("tpu-vm", "create")
    cloud.runs("--type=v6e-8")  # gcloud asks for an agent for several workers only

from flowfabric.model.signal import TimeoutSignal


def test_the_signal_of_a_deadline_is_not_one_a_caller_sends() -> None:
    told = TimeoutSignal()
    assert (told.waitpoint_key, told.signal_name, told.signal_category) == ("__timeout__", "timeout", "timeout")
    assert (told.source_type, told.source_identity) == ("system", "suspension_timeout")

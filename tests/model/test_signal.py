from flowfabric.model.signal import TimeoutSignal


def test_the_fields_of_a_timeout_signal() -> None:
    signal = TimeoutSignal()
    assert (signal.waitpoint_key, signal.signal_name, signal.signal_category) == ("__timeout__", "timeout", "timeout")
    assert (signal.source_type, signal.source_identity) == ("system", "suspension_timeout")

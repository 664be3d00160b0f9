"""What a run reports about itself: logged values, the ledger of its samples, notices."""

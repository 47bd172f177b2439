//! Everything offline: ledger, simulator, policies, analyses, reports, exports.

//! Element types of torch tensors, and how a `torch.save` names their storage.

use std::str::FromStr;

use thiserror::Error;

/// An element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DType(&'static Row);

/// A name that is no element type.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected a torch dtype with whole bytes per element, such as float32, got {0:?}")]
pub struct UnknownDType(String);

#[derive(Debug, PartialEq, Eq)]
struct Row {
    name: &'static str,
    bytes: u64,
    /// The storage class of types that had one; newer types name the dtype itself.
    storage: Option<&'static str>,
}

const fn old(name: &'static str, bytes: u64, storage: &'static str) -> Row {
    Row {
        name,
        bytes,
        storage: Some(storage),
    }
}

const fn new(name: &'static str, bytes: u64) -> Row {
    Row {
        name,
        bytes,
        storage: None,
    }
}

static ROWS: [Row; 22] = [
    old("float32", 4, "FloatStorage"),
    old("float64", 8, "DoubleStorage"),
    old("float16", 2, "HalfStorage"),
    old("bfloat16", 2, "BFloat16Storage"),
    old("int64", 8, "LongStorage"),
    old("int32", 4, "IntStorage"),
    old("int16", 2, "ShortStorage"),
    old("int8", 1, "CharStorage"),
    old("uint8", 1, "ByteStorage"),
    old("bool", 1, "BoolStorage"),
    old("complex64", 8, "ComplexFloatStorage"),
    old("complex128", 16, "ComplexDoubleStorage"),
    new("complex32", 4),
    new("uint16", 2),
    new("uint32", 4),
    new("uint64", 8),
    new("float8_e4m3fn", 1),
    new("float8_e5m2", 1),
    new("float8_e4m3fnuz", 1),
    new("float8_e5m2fnuz", 1),
    new("float8_e8m0fnu", 1),
    new("float4_e2m1fn_x2", 1),
];

impl DType {
    /// Torch's name, without `torch.`.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        self.0.bytes
    }

    /// Its legacy storage class in module `torch`, if it has one.
    pub(super) fn storage(self) -> Option<&'static str> {
        self.0.storage
    }
}

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        let row = ROWS.iter().find(|row| row.name == name);
        row.map(DType).ok_or_else(|| UnknownDType(name.into()))
    }
}

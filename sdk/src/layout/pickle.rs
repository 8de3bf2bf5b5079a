//! The `data.pkl` of a record: the few pickle opcodes that rebuild one contiguous tensor over storage `0`.

use super::dtype::DType;

/// The pickle of a contiguous CPU tensor, as `torch.save` writes it (protocol 2).
pub(super) fn tensor(dtype: DType, shape: &[u64], data_length: u64) -> Vec<u8> {
    let mut out = vec![0x80, 2];
    let rebuild = if dtype.storage().is_some() {
        "_rebuild_tensor_v2"
    } else {
        "_rebuild_tensor_v3"
    };
    global(&mut out, "torch._utils", rebuild);
    out.push(b'(');
    storage(&mut out, dtype, data_length);
    integer(&mut out, 0);
    tuple(&mut out, shape);
    tuple(&mut out, &strides(shape));
    // No gradient required, no backward hooks.
    out.push(0x89);
    global(&mut out, "collections", "OrderedDict");
    out.extend_from_slice(b")R");
    if dtype.storage().is_none() {
        global(&mut out, "torch", dtype.name());
    }
    out.extend_from_slice(b"tR.");
    out
}

/// The persistent id of the storage: ('storage', class, key, device, elements).
fn storage(out: &mut Vec<u8>, dtype: DType, data_length: u64) {
    out.push(b'(');
    text(out, "storage");
    let elements = match dtype.storage() {
        Some(class) => {
            global(out, "torch", class);
            data_length / dtype.bytes()
        }
        None => {
            global(out, "torch.storage", "UntypedStorage");
            data_length
        }
    };
    text(out, "0");
    text(out, "cpu");
    integer(out, elements);
    out.extend_from_slice(b"tQ");
}

/// Strides of a contiguous tensor, in elements; a size of 0 counts as 1, as torch does.
fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at] * shape[at].max(1);
    }
    strides
}

fn global(out: &mut Vec<u8>, module: &str, name: &str) {
    out.extend_from_slice(format!("c{module}\n{name}\n").as_bytes());
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend_from_slice(&(text.len() as u32).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn tuple(out: &mut Vec<u8>, items: &[u64]) {
    out.push(b'(');
    for item in items {
        integer(out, *item);
    }
    out.push(b't');
}

fn integer(out: &mut Vec<u8>, value: u64) {
    match value {
        0..=0xff => out.extend_from_slice(&[b'K', value as u8]),
        0x100..=0x7fff_ffff => {
            out.push(b'J');
            out.extend_from_slice(&(value as u32).to_le_bytes());
        }
        _ => {
            // LONG1 is signed: a ninth byte keeps the value positive.
            out.extend_from_slice(&[0x8a, 9]);
            out.extend_from_slice(&value.to_le_bytes());
            out.push(0);
        }
    }
}
